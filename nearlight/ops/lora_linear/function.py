"""The public function and its reference: checks, autocast, and the choice of the backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops._dropout import check as check_dropout
from nearlight.ops._dropout import draw_seed, plain_dropout
from nearlight.ops._linear_logits import autocast
from nearlight.ops.lora_linear.registration import forward_op
from nearlight.ops.lora_linear.tiles import MAX_RANK


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute it as PEFT's layer does, with the mask that the kernels draw."""
    y = F.linear(x, weight, bias)
    branch = x.to(lora_a.dtype)
    if training and p:
        branch = plain_dropout(branch, p, seed)
    return (y + F.linear(F.linear(branch, lora_a), lora_b) * scale).to(y.dtype)


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute a linear layer and its low-rank adapter.

    y = x · weightᵀ + bias + scale · dropout(x) · lora_aᵀ · lora_bᵀ

    Args:
        x: (..., K) bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        weight: (N, K) in the dtype and on the device of x, any strides.
        lora_a: (R, K), R up to 128, any strides, in the dtype of x or in fp32 beside 16 bits, in
            which PEFT keeps adapters: then dropout and both narrow products are fp32.
        lora_b: (N, R) in the dtype of lora_a, any strides.
        bias: (N,) in the dtype of x.
        scale: factor of the adapter: PEFT's lora_alpha / r (or / √r).
        p: share of x that the adapter's dropout drops, 0 to 1; the large product sees all of x.
        training: False drops nothing.
        seed: (2,) int64 on x's device; as in `dropout`, which draws the same mask for it. None
            draws one from the default generator where p is not 0.
        backend: "auto" (cuBLAS and Triton on CUDA, plain PyTorch on the CPU), "triton" or
            "reference".

    Returns:
        (..., N) in the dtype of x, contiguous. Differentiable once in x, weight, lora_a, lora_b
        and bias, and only what needs a gradient is computed. Under autocast all is cast as
        torch.nn.functional.linear casts.

    Raises:
        TypeError: dtypes that are not allowed or do not go together, DTensors.
        ValueError: shapes, devices, a rank, p or a seed that do not fit.

    Source: Hu et al. 2021, arXiv:2106.09685.

    Example:
        >>> import torch
        >>> from nearlight.ops import lora_linear
        >>> x, weight = torch.ones(1, 3), torch.eye(3)
        >>> lora_linear(x, weight, torch.ones(1, 3), torch.ones(3, 1), scale=0.5)
        tensor([[2.5000, 2.5000, 2.5000]])
    """
    _check(x, weight, lora_a, lora_b, bias)
    check_dropout("lora_linear", p, seed, x=x)
    x, weight, bias = autocast(x, weight, bias)
    lora_a, lora_b, _ = autocast(lora_a, lora_b, None)
    _check_dtypes(x, weight, lora_a, lora_b, bias)
    if not use_triton(backend, x):
        return reference(
            x, weight, lora_a, lora_b, bias, scale=scale, p=p, training=training, seed=seed
        )
    if (rank := lora_a.shape[0]) > MAX_RANK:
        raise ValueError(
            f"lora_linear: rank {rank}; allowed is 1 to {MAX_RANK} (backend='reference' runs "
            "products so wide as well)"
        )
    if not training or p == 0.0:
        seed, p = None, 0.0
    elif seed is None:
        seed = draw_seed(x)
    y: torch.Tensor = forward_op(x, weight, lora_a, lora_b, bias, seed, scale, p)[0]
    return y


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raise unless the shapes are those of one layer and all is on x's device."""
    refuse_dtensor("lora_linear", x, weight, lora_a, lora_b, bias)
    for name, matrix in (("weight", weight), ("lora_a", lora_a), ("lora_b", lora_b)):
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(
                f"lora_linear: {name} has shape {tuple(matrix.shape)}; allowed are two dimensions "
                "of 1 and more"
            )
    (outer, inner), rank = weight.shape, lora_a.shape[0]
    wanted = {
        "x": (x, (*x.shape[:-1], inner)),
        "lora_a": (lora_a, (rank, inner)),
        "lora_b": (lora_b, (outer, rank)),
        "bias": (bias, (outer,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tensor.shape != shape or tensor.device != weight.device):
            raise ValueError(
                f"lora_linear: {name} has shape {tuple(tensor.shape)} on {tensor.device}; for "
                f"weight {tuple(weight.shape)} on {weight.device} and rank {rank} it must be "
                f"{shape} there"
            )


def _check_dtypes(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    wanted = {
        "x": (x, FLOATS),
        "weight": (weight, (x.dtype,)),
        "bias": (bias, (x.dtype,)),
        "lora_a": (lora_a, tuple(dict.fromkeys((x.dtype, wide)))),
        "lora_b": (lora_b, (lora_a.dtype,)),
    }
    for name, (tensor, allowed) in wanted.items():
        if tensor is not None and tensor.dtype not in allowed:
            raise TypeError(
                f"lora_linear: {name} is {tensor.dtype}; beside x in {x.dtype} and lora_a in "
                f"{lora_a.dtype} allowed is {' or '.join(map(str, allowed))} (convert it, or use "
                "torch.autocast)"
            )

"""LayerNorm over the last dimension.

    y = (x − mean(x)) / sqrt(var(x) + eps) * weight + bias

Legend: N = width of a row (last dimension), rows = everything before it.
Source: Ba, Kiros & Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
Limits: N ≤ 262,144; sums in fp32 (fp64 for fp64 inputs), the variance from differences to the
mean (wide rows: Welford), so right where the mean is large; a row whose variance overflows the
sums' dtype (values past 1e19 in fp32) becomes 0 with zero gradients, NaN where its sum
overflows, too; gradients without atomics, so equal in every run; no gradient of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.rows import MAX_WIDTH, accumulator, check_rows, with_budgets
from nearlight.ops.layer_norm.kernels import config
from nearlight.ops.layer_norm.registration import (
    backward,
    backward_cost,
    forward,
    forward_cost,
    forward_op,
    workspace_bytes,
)

__all__ = ["OP", "config", "layer_norm", "reference"]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute LayerNorm in plain PyTorch; dtypes that differ meet in the accumulator's."""
    dtype, wide = output_dtype(x), accumulator(x.dtype)
    if any(p is not None and p.dtype != x.dtype for p in (weight, bias)):  # torch takes few pairs
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        x = x.to(wide)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)


def output_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the result: PyTorch's under CUDA autocast is the accumulator's."""
    is_autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
    return accumulator(x.dtype) if is_autocast else x.dtype


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Shift each row to mean 0, scale it to variance 1, then apply a weight and a bias.

    y = (x − mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, as
    `torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)`.

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides, N ≤ 262,144, on CPU or CUDA.
        weight: (N,) of any of these dtypes, on the same device; None for no scale.
        bias: (N,) likewise; None for no shift.
        eps: added to the variance.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., N) in x's dtype (fp32 under CUDA autocast, as PyTorch's), contiguous.

    Raises:
        ValueError: shape, device or backend that is not allowed.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450.

    Example:
        >>> import torch
        >>> from nearlight.ops import layer_norm
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    check_rows("layer_norm", x, weight=weight, bias=bias)
    if not use_triton(backend, x):
        return reference(x, weight, bias, eps)
    y: torch.Tensor = forward_op(x, weight, bias, eps, output_dtype(x))[0]
    return y


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    width = case.shape["N"]

    def random(*size: int) -> torch.Tensor:
        wide = torch.promote_types(case.dtype, torch.float32)
        values = torch.randn(*size, generator=generator, device=generator.device, dtype=wide)
        return values.to(device, case.dtype)

    tensors = {
        "x": random(case.shape["rows"], width).requires_grad_(),
        "weight": (1.0 + 0.1 * random(width)).requires_grad_(),
        "bias": (0.1 * random(width)).requires_grad_(),
    }
    return {**tensors, **case.options}


def _parameters(case: Case) -> list[bool]:
    return [case.options.get(name, True) is not None for name in ("weight", "bias")]


def _cost(case: Case) -> dict[str, Cost]:
    x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
    needs = [True, *_parameters(case)]
    tensors = [t if is_there else None for t, is_there in zip((x, x[0], x[0]), needs, strict=True)]
    there = forward_cost(tuple(tensors), {}, (x,))
    gradients = [t for t in tensors if t is not None]
    back = backward_cost((x, *tensors, needs), {}, gradients)
    return {"forward": there, "forward_backward": there + back}


def _extra_bytes(case: Case) -> int:
    rows, width = case.shape["rows"], case.shape["N"]
    statistics_bytes = 2 * rows * accumulator(case.dtype).itemsize
    return statistics_bytes + workspace_bytes(rows, width, case.dtype, sum(_parameters(case)))


def _large_mean(inputs: Inputs) -> Inputs:
    x = 30.0 + 0.01 * inputs["x"].detach()
    return {**inputs, "x": x.requires_grad_()}


def _flatten_first_row(inputs: Inputs) -> Inputs:
    x = inputs["x"].detach().clone()
    x[0] = 3.0
    return {**inputs, "x": x.requires_grad_()}


def _torch_peer() -> Callable[..., torch.Tensor]:
    return reference


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def run(x: torch.Tensor, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
        return LigerLayerNormFunction.apply(x, weight, bias, eps)

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
    shapes = ((16384, 768), (16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536))
    with described_launches(gpu_of_arch(arch)) as builds:
        for rows, width in shapes:
            x = torch.empty(rows, width, dtype=dtype, device="meta")
            _, mean, rstd = forward(x, x[0], x[0], 1e-5, dtype)
            backward(x, x, x[0], x[0], mean, rstd, [True] * 3)
    return with_budgets(builds, forward_registers=96)


def _case(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    name = " ".join([f"{rows}x{width}", *(f"{key}={value}" for key, value in options.items())])
    return Case(name, {"rows": rows, "N": width}, dtype, options)


_WIDTHS = (1, 7, 64, 127, 128, 129, 768)

OP = Op(
    name="layer_norm",
    function=layer_norm,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        _case(16384, 4096),
        _case(16384, 8192),
        _case(16384, 768),  # GPT-2, batch 16 of 1024 tokens
    ],
    check_cases=[
        *(_case(5, width, torch.float32) for width in _WIDTHS),
        *(_case(3, 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        _case(9, 65, weight=None),
        _case(9, 65, bias=None),
        _case(9, 65, weight=None, bias=None),
        _case(9, 65, torch.float32, eps=1e-3),
        _case(4097, 64, torch.float32),
        _case(1, MAX_BLOCK + 1, torch.float32),
        _case(2, 70_000),
        _case(1, MAX_WIDTH, torch.float32),
    ],
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": _torch_peer, "liger": _liger_peer},
    builds=_builds,
    extremes=[
        Extreme("mean 30, std 0.01", _case(3, 257, torch.float32), _large_mean),
        Extreme("mean 30, std 0.01, wide", _case(2, 70_000, torch.float32), _large_mean),
        Extreme("a row of one value", _case(3, 64, torch.float32), _flatten_first_row),
    ],
)

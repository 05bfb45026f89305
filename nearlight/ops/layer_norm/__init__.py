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

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.op import Extreme, Inputs, Op
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.rows import MAX_WIDTH, accumulator, check_rows
from nearlight.ops._row_norm import RowNorm, case_of
from nearlight.ops.layer_norm import kernels
from nearlight.ops.layer_norm.kernels import config

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


norm = RowNorm(
    "layer_norm",
    config,
    (kernels._layer_norm_fwd_kernel, kernels._layer_norm_fwd_wide_kernel),
    (kernels._layer_norm_bwd_kernel, kernels._layer_norm_bwd_projection_kernel),
    parameters=("weight", "bias"),
    statistics=("mean", "rstd"),
    options={"eps": 1e-5},
    backward_options=(),
    flops=(7, 13),
    shapes=((16384, 768), (16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536)),
    forward_registers=96,
)
_forward_op = norm.register()


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
    y: torch.Tensor = _forward_op(x, weight, bias, eps, output_dtype(x))[0]
    return y


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


_WIDTHS = (1, 7, 64, 127, 128, 129, 768)

OP = Op(
    name="layer_norm",
    function=layer_norm,
    reference=reference,
    make_inputs=norm.make_inputs,
    cases=[
        case_of(16384, 4096),
        case_of(16384, 8192),
        case_of(16384, 768),  # GPT-2, batch 16 of 1024 tokens
    ],
    check_cases=[
        *(case_of(5, width, torch.float32) for width in _WIDTHS),
        *(case_of(3, 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        case_of(9, 65, weight=None),
        case_of(9, 65, bias=None),
        case_of(9, 65, weight=None, bias=None),
        case_of(9, 65, torch.float32, eps=1e-3),
        case_of(4097, 64, torch.float32),
        case_of(1, MAX_BLOCK + 1, torch.float32),
        case_of(2, 70_000),
        case_of(1, MAX_WIDTH, torch.float32),
    ],
    cost=norm.cost_of,
    extra_bytes=norm.extra_bytes_of,
    peers={"torch": _torch_peer, "liger": _liger_peer},
    builds=norm.builds,
    extremes=[
        Extreme("mean 30, std 0.01", case_of(3, 257, torch.float32), _large_mean),
        Extreme("mean 30, std 0.01, wide", case_of(2, 70_000, torch.float32), _large_mean),
        Extreme("a row of one value", case_of(3, 64, torch.float32), _flatten_first_row),
    ],
)

"""LayerNorm of a residual stream: the sum of a block's output and the stream, and its norm.

    total = residual + x        y = (total − mean(total)) / sqrt(var(total) + eps) * weight + bias

Legend: N = width of a row (last dimension), rows = everything before it.
Source: Ba, Kiros & Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
Limits: as of `layer_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.op import Extreme, Inputs, Op
from nearlight.core.row_config import MAX_BLOCK, tunable_config
from nearlight.core.rows import check_rows
from nearlight.ops._add_residual import WIDE, check_residual
from nearlight.ops._row_norm import RowNorm, case_of
from nearlight.ops.layer_norm import kernels as layer
from nearlight.ops.layer_norm import output_dtype
from nearlight.ops.layer_norm import reference as layer_norm_reference

__all__ = ["OP", "add_layer_norm", "config", "reference"]


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sum and its LayerNorm in plain PyTorch; arguments as in `add_layer_norm`."""
    total = residual + x
    return layer_norm_reference(total, weight, bias, eps).to(output_dtype(x)), total


config = tunable_config("add_layer_norm", num_sums=2, num_upstream=2)
norm = RowNorm(
    "add_layer_norm",
    config,
    (layer._layer_norm_fwd_kernel, layer._layer_norm_fwd_wide_kernel),
    (layer._layer_norm_bwd_kernel, layer._layer_norm_bwd_projection_kernel),
    parameters=("weight", "bias"),
    statistics=("mean", "rstd"),
    options={"eps": 1e-5},
    backward_options=(),
    flops=(8, 14),
    shapes=((16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536)),
    forward_registers=104,
    has_residual=True,
)
_forward_op = norm.register()


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the residual stream and normalise the sum.

    total = residual + x;  y = (total − mean(total)) / sqrt(var(total) + eps) * weight + bias

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides, N ≤ 262,144, on CPU or CUDA.
        residual: shape and device of `x`, any strides; of its dtype, or fp32 beside a half one.
        weight: (N,) of any of these dtypes, on the same device; None for no scale.
        bias: (N,) likewise; None for no shift.
        eps: added to the variance.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        y, (..., N), contiguous, in the dtype of `x` (fp32 under CUDA autocast, as PyTorch's); and
        the sum, (..., N), contiguous, in the dtype of `residual`.

    Raises:
        ValueError: shape, device or backend that is not allowed.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450.

    Example:
        >>> import torch
        >>> from nearlight.ops import add_layer_norm
        >>> add_layer_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 1.0]]), eps=0.0)
        (tensor([[-1.,  1.]]), tensor([[3., 5.]]))
    """
    check_rows("add_layer_norm", x, weight=weight, bias=bias)
    check_residual("add_layer_norm", x, residual)
    if not use_triton(backend, x):
        return reference(x, residual, weight, bias, eps)
    y, total, *_ = _forward_op(x, residual, weight, bias, eps, output_dtype(x))
    return y, total


def _large_mean(inputs: Inputs) -> Inputs:
    x, residual = (0.01 * inputs[name].detach() for name in ("x", "residual"))
    residual += 30.0
    return {**inputs, "x": x.requires_grad_(), "residual": residual.requires_grad_()}


def _torch_peer() -> Callable[..., Any]:
    return reference


OP = Op(
    name="add_layer_norm",
    function=add_layer_norm,
    reference=reference,
    make_inputs=norm.make_inputs,
    cases=[
        *(case_of(16384, width) for width in (768, 2880, 4096, 8192)),
        case_of(16384, 4096, **WIDE),
    ],
    check_cases=[
        *(case_of(5, width, torch.float32) for width in (1, 7, 64, 127, 129)),
        *(case_of(3, 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        *(case_of(9, 65, dtype, **WIDE) for dtype in (torch.bfloat16, torch.float16)),
        case_of(9, 65, weight=None),
        case_of(9, 65, bias=None, **WIDE),
        case_of(9, 65, weight=None, bias=None),
        case_of(1, MAX_BLOCK + 1, torch.float32),
        case_of(2, 70_000, **WIDE),
    ],
    cost=norm.cost_of,
    extra_bytes=norm.extra_bytes_of,
    peers={"torch": _torch_peer},
    builds=norm.builds,
    extremes=[
        Extreme("mean 30, std 0.03", case_of(3, 257, torch.float32), _large_mean),
        Extreme("mean 30, std 0.03, wide", case_of(2, 70_000, torch.float32), _large_mean),
    ],
)

"""RMSNorm of a residual stream: the sum of a block's output and the stream, and its norm, at once.

    total = residual + x        y = total / sqrt(mean(total²) + eps) * (offset + weight)

Legend: N = width of a row (last dimension), rows = everything before it.
Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
Limits: as of `rms_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.op import Op
from nearlight.core.row_config import MAX_BLOCK, tunable_config
from nearlight.core.rows import check_rows
from nearlight.ops._add_residual import WIDE, check_residual
from nearlight.ops._row_norm import RowNorm, case_of
from nearlight.ops.rms_norm import CASTINGS, check_options, roundings
from nearlight.ops.rms_norm import kernels as rms
from nearlight.ops.rms_norm import reference as rms_norm_reference

__all__ = ["OP", "add_rms_norm", "config", "reference"]


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sum and its RMSNorm in plain PyTorch; arguments as in `add_rms_norm`."""
    total = residual + x
    if total.dtype == x.dtype:
        return rms_norm_reference(total, weight, eps, offset=offset, casting=casting), total
    # The stream is wider than x: the norm is cast as if its input had the dtype of x.
    y = rms_norm_reference(total, None, eps)
    is_rounded, dtype = roundings(x, weight, casting)
    if weight is None:
        return y.to(dtype), total
    if is_rounded:
        return (weight + offset) * y.to(x.dtype), total
    return (y * (offset + weight.to(y.dtype))).to(dtype), total


config = tunable_config("add_rms_norm", num_sums=1, num_upstream=2)
norm = RowNorm(
    "add_rms_norm",
    config,
    (rms._rms_norm_fwd_kernel, rms._rms_norm_fwd_wide_kernel),
    (rms._rms_norm_bwd_kernel, rms._rms_norm_bwd_projection_kernel),
    parameters=("weight",),
    statistics=("rstd",),
    options={"eps": 1e-6, "offset": 0.0, "round": True},
    backward_options=("offset",),
    flops=(5, 10),
    shapes=((16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536)),
    forward_registers=104,
    has_residual=True,
)
_forward_op = norm.register()


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Literal["llama", "gemma", "none"] = "llama",
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the residual stream and normalise the sum.

    total = residual + x;  y = total / sqrt(mean(total²) + eps) * (offset + weight)

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides, N ≤ 262,144, on CPU or CUDA.
        residual: shape and device of `x`, any strides; of its dtype, or fp32 beside a half one.
        weight: (N,) of any of these dtypes, on the same device; None for no scale.
        eps: added to the mean square.
        offset: added to the weight (1.0 in Gemma, whose weights are stored around zero).
        casting: as of `rms_norm`; the norm is cast as if its input had the dtype of `x`.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        y, (..., N), contiguous, as `rms_norm` returns it; and the sum, (..., N), contiguous, in
        the dtype of `residual`.

    Raises:
        ValueError: shape, device, casting or backend that is not allowed.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> import torch
        >>> from nearlight.ops import add_rms_norm
        >>> add_rms_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]), eps=0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    check_rows("add_rms_norm", x, weight=weight)
    check_residual("add_rms_norm", x, residual)
    check_options("add_rms_norm", weight, offset, casting)
    if not use_triton(backend, x):
        return reference(x, residual, weight, eps, offset=offset, casting=casting)
    casts = roundings(x, weight, casting)
    y, total, _ = _forward_op(x, residual, weight, eps, offset, *casts)
    return y, total


def _torch_peer() -> Callable[..., Any]:
    def run(x: torch.Tensor, residual: torch.Tensor, weight: Any = None, eps: float = 1e-6) -> Any:
        total = residual + x
        return F.rms_norm(total, x.shape[-1:], weight, eps).to(x.dtype), total

    return run


def _liger_peer() -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def run(x: torch.Tensor, residual: torch.Tensor, weight: Any = None, eps: float = 1e-6) -> Any:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)

    return run


OP = Op(
    name="add_rms_norm",
    function=add_rms_norm,
    reference=reference,
    make_inputs=norm.make_inputs,
    cases=[
        *(case_of(16384, width) for width in (2880, 4096, 7168, 8192)),
        case_of(16384, 4096, **WIDE),
        case_of(4096, 16384),
    ],
    check_cases=[
        *(case_of(5, width, torch.float32) for width in (1, 7, 64, 127, 129)),
        *(case_of(3, 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        *(case_of(9, 65, casting=casting, **wide) for casting in CASTINGS for wide in ({}, WIDE)),
        case_of(9, 65, casting="gemma", offset=1.0),
        case_of(4, 65, torch.float16, **WIDE),
        case_of(9, 65, weight=None),
        case_of(1, MAX_BLOCK + 1, torch.float32),
        case_of(2, 70_000, **WIDE),
    ],
    large_cases=[case_of(600_000, 4096)],
    cost=norm.cost_of,
    extra_bytes=norm.extra_bytes_of,
    peers={"torch": _torch_peer, "liger": _liger_peer},
    builds=norm.builds,
)

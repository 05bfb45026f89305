"""A residual that a norm's kernels add: what they call for it, and which residuals are taken."""

from __future__ import annotations

import torch
import triton.language as tl

from nearlight.core.rows import refuse_dtensor
from nearlight.core.triton import jit

WIDE = {"residual_dtype": torch.float32}  # an option of cases


def check_residual(op: str, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raise unless `residual` is as `x`, or fp32 beside a half-precision one."""
    refuse_dtensor(op, residual)
    if residual.dtype != x.dtype and (residual.dtype, x.dtype.itemsize) != (torch.float32, 2):
        raise TypeError(
            f"{op}: residual is {residual.dtype} and x {x.dtype}; allowed is the dtype of x, or "
            "fp32 beside fp16 or bf16"
        )
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"{op}: residual has shape {tuple(residual.shape)} on {residual.device} and x "
            f"{tuple(x.shape)} on {x.device}; they must agree"
        )


@jit
def add_residual(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    x, residual_ptr, sum_ptr, row, cols, stride_residual, N: tl.constexpr, mask, ACC: tl.constexpr
):
    """Return x plus the residual, rounded as it is stored in the sum."""
    total = x + tl.load(residual_ptr + row * stride_residual + cols, mask, other=0.0).to(ACC)
    total = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * N + cols, total, mask)
    return total.to(ACC)


@jit
def store_dx(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    dx,
    dx_ptr,
    dsum_ptr,
    dresidual_ptr,
    rows,
    cols,
    stride_dsum,
    N: tl.constexpr,
    mask,
    ACC: tl.constexpr,
):
    """Add the gradient of the sum, where there is one, and store in the dtypes asked for."""
    if dsum_ptr is not None:
        dsum_at = rows[:, None] * stride_dsum + cols[None, :]
        dx += tl.load(dsum_ptr + dsum_at, mask, other=0.0).to(ACC)
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + rows[:, None] * N + cols[None, :], dx, mask)

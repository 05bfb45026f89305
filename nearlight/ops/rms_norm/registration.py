"""RMSNorm as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, register_cost, tensor_bytes
from nearlight.core.hardware import find_gpu
from nearlight.core.rows import (
    MAX_BLOCK,
    accumulator,
    as_rows,
    column_sums,
    launch_gpu,
    triton_accumulator,
)
from nearlight.ops.rms_norm import kernels


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, rstd = _forward_fake(x, weight, eps, offset, round_first, dtype)
    if x.numel() == 0:
        return y, rstd.fill_(eps**-0.5 if eps else torch.inf)
    x_rows = as_rows(x)
    rows, width = x_rows.shape
    chosen = kernels.config((rows, width), x.dtype, launch_gpu(x.device))
    if weight is not None:
        weight = weight.contiguous()
    constants: dict[str, Any] = {
        "N": width,
        "EPS": eps,
        "OFFSET": offset,
        "ROUND": round_first,
        "ACC": triton_accumulator(x.dtype),
        "BLOCK_N": chosen.block_n,
        "num_warps": chosen.num_warps,
    }
    stride = x_rows.stride(0)
    if chosen.block_n < width:
        kernels._rms_norm_fwd_wide_kernel[(rows,)](
            x_rows, weight, y, rstd, stride, NUM_STAGES=chosen.num_stages, **constants
        )
    else:
        kernels._rms_norm_fwd_kernel[(chosen.num_programs,)](
            x_rows, weight, y, rstd, stride, rows, BLOCK_M=chosen.block_m, **constants
        )
    return y, rstd


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight = _backward_fake(dy, x, weight, rstd, offset, needs_dx, needs_dweight)
    if x.numel() == 0:
        return dx, dweight.zero_()
    dy_rows, x_rows = as_rows(dy), as_rows(x)
    rows, width = x_rows.shape
    chosen = kernels.config((rows, width), x.dtype, launch_gpu(x.device), "backward")
    if weight is not None:
        weight = weight.contiguous()
    acc = accumulator(x.dtype)
    constants: dict[str, Any] = {
        "N": width,
        "OFFSET": offset,
        "ACC": triton_accumulator(x.dtype),
        "BLOCK_N": chosen.block_n,
        "NUM_STAGES": chosen.num_stages,
        "num_warps": chosen.num_warps,
    }
    strides = dy_rows.stride(0), x_rows.stride(0)
    projection = partials = None
    if needs_dx and chosen.block_n < width:
        projection = torch.empty(rows, dtype=acc, device=x.device)
        kernels._rms_norm_bwd_projection_kernel[(rows,)](
            dy_rows, x_rows, weight, rstd, projection, *strides, **constants
        )
    if needs_dweight:
        partials = torch.empty(1, chosen.num_programs, width, dtype=acc, device=x.device)
    kernels._rms_norm_bwd_kernel[(chosen.num_programs * triton.cdiv(width, chosen.block_n),)](
        dy_rows,
        x_rows,
        weight,
        rstd,
        projection,
        dx if needs_dx else None,
        partials,
        *strides,
        rows,
        BLOCK_M=chosen.block_m,
        **constants,
    )
    if partials is not None:
        column_sums(partials, dweight)
    return dx, dweight


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A gradient nobody asked for has no elements.
    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    width = x.shape[-1:] if needs_dweight else (0,)
    dtype = x.dtype if weight is None else weight.dtype
    return dx, torch.empty(width, dtype=dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, ctx.offset, *_ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    needs_dx, needs_dweight = ctx.needs_input_grad[:2]
    dx = dweight = None
    if dy is not None:
        dx, dweight = backward_op(dy, *ctx.saved_tensors, ctx.offset, needs_dx, needs_dweight)
    return dx if needs_dx else None, dweight if needs_dweight else None, None, None, None, None


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "rms_norm has no gradient of its gradient; use backend='reference' where one is needed"
    )


_library = torch.library.Library("nearlight", "FRAGMENT")
_library.define(
    "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset, bool round_first, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)
_library.define(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool needs_dx, "
    "bool needs_dweight) -> (Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("rms_norm_fwd", _forward, _device)
    _library.impl("rms_norm_bwd", _backward, _device)
torch.library.register_fake("nearlight::rms_norm_fwd", _forward_fake, lib=_library)
torch.library.register_fake("nearlight::rms_norm_bwd", _backward_fake, lib=_library)
torch.library.register_autograd(
    "nearlight::rms_norm_fwd", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd("nearlight::rms_norm_bwd", _refuse_double_backward, lib=_library)
forward_op = torch.ops.nearlight.rms_norm_fwd.default
backward_op = torch.ops.nearlight.rms_norm_bwd.default


@register_cost("nearlight::rms_norm_fwd")
def forward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each output written once."""
    x, weight, *_ = args
    # rstd follows from x: it is no part of the fewest bytes.
    return Cost(
        flops={_pipe(x): 4 * x.numel()},
        bytes_read=tensor_bytes(x) + (0 if weight is None else tensor_bytes(weight)),
        bytes_written=tensor_bytes(outputs[0]),
    )


@register_cost("nearlight::rms_norm_bwd")
def backward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each gradient written once; partial sums are workspace."""
    dy, x, weight, *_, needs_dx, needs_dweight = args
    width = x.shape[-1]
    workspace = workspace_bytes(x.numel() // max(width, 1), width, x.dtype, needs_dweight)
    return Cost(
        flops={_pipe(x): 9 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (dy, x, weight) if t is not None),
        bytes_written=sum(tensor_bytes(t) for t in outputs),
        num_kernels=1 + bool(needs_dweight) + (needs_dx and width > MAX_BLOCK),
        workspace_bytes=workspace,
    )


def _pipe(x: torch.Tensor) -> str:
    return "fp64" if x.dtype == torch.float64 else "fp32"


def workspace_bytes(rows: int, width: int, dtype: torch.dtype, needs_dweight: bool) -> int:
    """Return the bytes that live only during a backward pass, as launched on an H200."""
    chosen = kernels.config((rows, width), dtype, find_gpu("h200"), "backward")
    elements = chosen.num_programs * width * needs_dweight + rows * (chosen.block_n < width)
    return elements * accumulator(dtype).itemsize

"""RMSNorm as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.rows import accumulator, accumulator_pipe, row_backward, row_forward, row_shape
from nearlight.ops.rms_norm import kernels


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and rstd, (...) in accumulator dtype."""
    y, rstd = _forward_fake(x, weight, eps, offset, round_first, dtype)
    if x.numel() == 0:
        return y, rstd.fill_(eps**-0.5 if eps else torch.inf)
    chosen = kernels.config(row_shape(x), x.dtype, launch_gpu(x.device))
    both = kernels._rms_norm_fwd_kernel, kernels._rms_norm_fwd_wide_kernel
    constants: dict[str, Any] = {"EPS": eps, "OFFSET": offset, "ROUND": round_first}
    row_forward(both, chosen, x, [weight], [y, rstd], **constants)
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


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and weight; one not needed has no elements."""
    dx, dweight = _backward_fake(dy, x, weight, rstd, offset, needs_dx, needs_dweight)
    if x.numel() == 0:
        return dx, dweight.zero_()
    chosen = kernels.config(row_shape(x), x.dtype, launch_gpu(x.device), "backward")
    both = kernels._rms_norm_bwd_kernel, kernels._rms_norm_bwd_projection_kernel
    gradients = dx if needs_dx else None, [dweight if needs_dweight else None]
    row_backward(both, chosen, dy, x, weight, [rstd], *gradients, OFFSET=offset)
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


def forward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each output written once."""
    x, weight, *_ = args
    # rstd follows from x: it is no part of the fewest bytes.
    return Cost(
        flops={accumulator_pipe(x.dtype): 4 * x.numel()},
        bytes_read=tensor_bytes(x) + (0 if weight is None else tensor_bytes(weight)),
        bytes_written=tensor_bytes(outputs[0]),
    )


def backward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each gradient written once; partial sums are workspace."""
    dy, x, weight, *_, needs_dx, needs_dweight = args
    width = x.shape[-1]
    workspace = workspace_bytes(x.numel() // max(width, 1), width, x.dtype, needs_dweight)
    return Cost(
        flops={accumulator_pipe(x.dtype): 9 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (dy, x, weight) if t is not None),
        bytes_written=sum(tensor_bytes(t) for t in outputs),
        num_kernels=1 + bool(needs_dweight) + (needs_dx and width > MAX_BLOCK),
        workspace_bytes=workspace,
    )


def workspace_bytes(rows: int, width: int, dtype: torch.dtype, needs_dweight: bool) -> int:
    """Return the bytes that live only during a backward pass, as launched on an H200."""
    chosen = kernels.config((rows, width), dtype, find_gpu("h200"), "backward")
    elements = chosen.num_programs * width * needs_dweight + rows * (chosen.block_n < width)
    return elements * accumulator(dtype).itemsize


forward_op = register_op(
    "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset, bool round_first, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    forward,
    fake=_forward_fake,
    cost=forward_cost,
    backward=_differentiate,
    save=_save,
)
backward_op = register_op(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool needs_dx, "
    "bool needs_dweight) -> (Tensor, Tensor)",
    backward,
    fake=_backward_fake,
    cost=backward_cost,
)

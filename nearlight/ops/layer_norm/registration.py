"""LayerNorm as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.core.row_config import (
    MAX_BLOCK,
)
from nearlight.core.rows import (
    FEW_COLUMNS,
    accumulator,
    accumulator_pipe,
    row_backward,
    row_forward,
    row_shape,
)
from nearlight.ops.layer_norm import kernels


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, mean and rstd, the last two (...) in accumulator dtype."""
    y, mean, rstd = _forward_fake(x, weight, bias, eps, dtype)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    chosen = kernels.config(row_shape(x), x.dtype, launch_gpu(x.device))
    both = kernels._layer_norm_fwd_kernel, kernels._layer_norm_fwd_wide_kernel
    row_forward(both, chosen, x, [weight, bias], [y, mean, rstd], EPS=eps)
    return y, mean, rstd


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    mean = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    return y, mean, torch.empty_like(mean)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias; one not needed has no elements."""
    dx, dweight, dbias = _backward_fake(dy, x, weight, bias, mean, rstd, needs)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    chosen = kernels.config(row_shape(x), x.dtype, launch_gpu(x.device), "backward")
    both = kernels._layer_norm_bwd_kernel, kernels._layer_norm_bwd_projection_kernel
    grad_x, *sums = (
        gradient if is_needed else None
        for gradient, is_needed in zip((dx, dweight, dbias), needs, strict=True)
    )
    # One rounding for a product and the mean taken off it would leave noise where the gradient of
    # a row of one or two columns is exactly zero.
    options: dict[str, Any] = {"enable_fp_fusion": x.shape[-1] > FEW_COLUMNS}
    row_backward(both, chosen, dy, x, weight, [mean, rstd], grad_x, sums, **options)
    return dx, dweight, dbias


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A gradient nobody asked for has no elements.
    dx = torch.empty(x.shape if needs[0] else (0,), dtype=x.dtype, device=x.device)
    dweight, dbias = (
        torch.empty(
            x.shape[-1:] if is_needed else (0,),
            dtype=x.dtype if parameter is None else parameter.dtype,
            device=x.device,
        )
        for parameter, is_needed in zip((weight, bias), needs[1:], strict=True)
    )
    return dx, dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, *_ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    if dy is None:
        return (None,) * 5
    grads = backward_op(dy, *ctx.saved_tensors, needs)
    return (
        *(g if is_needed else None for g, is_needed in zip(grads, needs, strict=True)),
        None,
        None,
    )


def forward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each output written once."""
    x, weight, bias, *_ = args
    # mean and rstd follow from x: they are no part of the fewest bytes.
    return Cost(
        flops={accumulator_pipe(x.dtype): 7 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (x, weight, bias) if t is not None),
        bytes_written=tensor_bytes(outputs[0]),
    )


def backward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each gradient written once; partial sums are workspace."""
    dy, x, weight, *_, needs = args
    width, sums = x.shape[-1], sum(needs[1:])
    return Cost(
        flops={accumulator_pipe(x.dtype): 13 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (dy, x, weight) if t is not None),
        bytes_written=sum(tensor_bytes(t) for t in outputs),
        num_kernels=1 + (sums > 0) + (needs[0] and width > MAX_BLOCK // 2),
        workspace_bytes=workspace_bytes(x.numel() // max(width, 1), width, x.dtype, sums),
    )


def workspace_bytes(rows: int, width: int, dtype: torch.dtype, sums: int) -> int:
    """Return the bytes that live only during a backward pass, as launched on an H200."""
    chosen = kernels.config((rows, width), dtype, find_gpu("h200"), "backward")
    elements = chosen.num_programs * width * sums + 2 * rows * (chosen.block_n < width)
    return elements * accumulator(dtype).itemsize


forward_op = register_op(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    forward,
    fake=_forward_fake,
    cost=forward_cost,
    backward=_differentiate,
    save=_save,
)
backward_op = register_op(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "bool[] needs) -> (Tensor, Tensor, Tensor)",
    backward,
    fake=_backward_fake,
    cost=backward_cost,
)

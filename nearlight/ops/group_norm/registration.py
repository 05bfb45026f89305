"""Group normalisation as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.hardware import Gpu, find_gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator, accumulator_pipe, column_sums, triton_accumulator
from nearlight.ops.group_norm import kernels

# Partial sums that a program adds at once, of as many groups as fit.
_COMBINED = 1024


def _as_ncs(tensor: torch.Tensor) -> torch.Tensor:
    """Return (N, C, S), a view where the positions merge."""
    return tensor.reshape(*tensor.shape[:2], tensor.shape[2:].numel())


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an output: channels last where x is, else contiguous."""
    moved = x.movedim(1, -1)
    if not x.is_contiguous() and moved.is_contiguous():
        return torch.empty(moved.shape, dtype=dtype, device=x.device).movedim(-1, 1)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@dataclass(frozen=True)
class _Plan:
    """How the kernels of one call are launched.

    Attributes:
        sizes: channels and positions.
        num_sums: partial sums of one kind.
        num_partials: of each channel.
        by_piece, by_tile, by_group: grids of the kernels that make partial sums, write tiles, and
            add partial sums.
        piece, tile, group: their constants.
    """

    sizes: tuple[int, int]
    num_sums: int
    num_partials: int
    by_piece: tuple[int]
    by_tile: tuple[int]
    by_group: tuple[int]
    piece: dict[str, Any]
    tile: dict[str, Any]
    group: dict[str, Any]


def _config(x: torch.Tensor, gpu: Gpu | None) -> kernels.Config:
    shape = x.shape[0], x.shape[1], x.shape[2:].numel()
    return kernels.config(shape, x.dtype, gpu, x.stride(1) == 1 and x.shape[1] > 1)


def _plan(x: torch.Tensor, num_groups: int) -> _Plan:
    samples, channels, positions = x.shape
    chosen = _config(x, launch_gpu(x.device))
    group = channels // num_groups
    num_pieces = triton.cdiv(positions, chosen.piece)
    num_blocks = triton.cdiv(channels, chosen.block_c)
    block = min(triton.next_power_of_2(num_pieces * group), _COMBINED)
    block_g = min(triton.next_power_of_2(samples * num_groups), _COMBINED // block)
    common = {"GROUP": group, "ACC": triton_accumulator(x.dtype)}
    tile = {**common, "BLOCK_C": chosen.block_c, "BLOCK_S": chosen.block_s}
    tile["num_warps"] = chosen.num_warps
    return _Plan(
        sizes=(channels, positions),
        num_sums=samples * num_pieces * channels,
        num_partials=samples * num_pieces,
        by_piece=(samples * num_pieces * num_blocks,),
        by_tile=(samples * triton.cdiv(positions, chosen.block_s) * num_blocks,),
        by_group=(triton.cdiv(samples * num_groups, block_g),),
        piece={**tile, "PIECE": chosen.piece},
        tile=tile,
        group={**common, "PIECE": chosen.piece, "BLOCK_G": block_g, "BLOCK": block},
    )


def forward(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the mean of each group in two numbers that add up, (2, N, G), and rstd (N, G)."""
    y, mean, rstd = _forward_fake(x, num_groups, weight, bias, eps, dtype)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    x_ncs, y_ncs = _as_ncs(x), _as_ncs(y)
    how = _plan(x_ncs, num_groups)
    partials = mean.new_empty(2, how.num_partials, how.sizes[0])
    kernels._group_norm_moments_kernel[how.by_piece](
        x_ncs, partials, *how.sizes, how.num_sums, *x_ncs.stride(), **how.piece
    )
    kernels._group_norm_combine_kernel[how.by_group](
        x_ncs,
        partials,
        mean,
        rstd,
        rstd.numel(),
        *how.sizes,
        how.num_sums,
        *x_ncs.stride(),
        EPS=eps,
        **how.group,
    )
    parameters = [None if p is None else p.contiguous() for p in (weight, bias)]
    kernels._group_norm_fwd_kernel[how.by_tile](
        x_ncs,
        *parameters,
        mean,
        rstd,
        y_ncs,
        rstd.numel(),
        *how.sizes,
        *x_ncs.stride(),
        *y_ncs.stride(),
        **how.tile,
    )
    return y, mean, rstd


def _forward_fake(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = x.new_empty(2, x.shape[0], num_groups, dtype=accumulator(x.dtype))
    return _like(x, dtype), mean, torch.empty_like(mean[0])


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias; one not needed has no elements."""
    gradients = dx, dweight, dbias = _backward_fake(
        dy, x, weight, mean, rstd, weight_dtype, bias_dtype, needs
    )
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    dy_ncs, x_ncs = _as_ncs(dy), _as_ncs(x)
    how = _plan(x_ncs, rstd.shape[1])
    partials = mean.new_empty(2, how.num_partials, how.sizes[0])
    strides = *dy_ncs.stride(), *x_ncs.stride()
    kernels._group_norm_bwd_sums_kernel[how.by_piece](
        dy_ncs,
        x_ncs,
        mean,
        rstd,
        partials,
        rstd.numel(),
        *how.sizes,
        how.num_sums,
        *strides,
        **how.piece,
    )
    if needs[1] and needs[2]:
        column_sums(partials, dweight, dbias)
    elif needs[1] or needs[2]:
        which = 0 if needs[1] else 1
        column_sums(partials[which : which + 1], gradients[1 + which])
    if needs[0]:
        weight = None if weight is None else weight.contiguous()
        projections = torch.empty_like(mean)
        kernels._group_norm_bwd_combine_kernel[how.by_group](
            partials, weight, projections, rstd.numel(), *how.sizes, how.num_sums, **how.group
        )
        dx_ncs = _as_ncs(dx)
        kernels._group_norm_bwd_kernel[how.by_tile](
            dy_ncs,
            x_ncs,
            weight,
            mean,
            rstd,
            projections,
            dx_ncs,
            rstd.numel(),
            *how.sizes,
            *strides,
            *dx_ncs.stride(),
            **how.tile,
        )
    return gradients


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A gradient nobody asked for has no elements.
    dx = _like(x, x.dtype) if needs[0] else x.new_empty(0)
    dweight, dbias = (
        x.new_empty(x.shape[1] if needed else 0, dtype=dtype)
        for dtype, needed in ((weight_dtype, needs[1]), (bias_dtype, needs[2]))
    )
    return dx, dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, weight, bias, *_ = inputs
    ctx.dtypes = [x.dtype if each is None else each.dtype for each in (weight, bias)]
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = [ctx.needs_input_grad[index] for index in (0, 2, 3)]
    if dy is None:
        return (None,) * 6
    gradients = backward_op(dy, *ctx.saved_tensors, *ctx.dtypes, needs)
    dx, dweight, dbias = (
        gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
    )
    return dx, None, dweight, dbias, None, None


def forward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each output written once."""
    x, _, weight, bias, *_ = args
    return Cost(
        flops={accumulator_pipe(x.dtype): 8 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (x, weight, bias) if t is not None),
        bytes_written=tensor_bytes(outputs[0]),
        num_kernels=3,
        workspace_bytes=_partial_bytes(x),
    )


def backward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each gradient written once; partial sums are workspace."""
    dy, x, weight, *_, needs = args
    return Cost(
        flops={accumulator_pipe(x.dtype): 14 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (dy, x, weight) if t is not None),
        bytes_written=sum(map(tensor_bytes, outputs)),
        num_kernels=1 + 2 * bool(needs[0]) + any(needs[1:]),
        workspace_bytes=_partial_bytes(x),
    )


def _partial_bytes(x: torch.Tensor) -> int:
    """Return the bytes of the partial sums, as launched on an H200."""
    if x.numel() == 0:
        return 0
    num_pieces = triton.cdiv(x.shape[2:].numel(), _config(x, find_gpu("h200")).piece)
    return 2 * x.shape[:2].numel() * num_pieces * accumulator(x.dtype).itemsize


def extra_bytes(x: torch.Tensor, num_groups: int) -> int:
    """Return the bytes beyond the inputs and results: statistics, partial sums, projections."""
    groups_bytes = 5 * x.shape[0] * num_groups * accumulator(x.dtype).itemsize
    return _partial_bytes(x) + groups_bytes + 4096


forward_op = register_op(
    "group_norm_fwd(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    forward,
    fake=_forward_fake,
    cost=forward_cost,
    backward=_differentiate,
    save=_save,
)
backward_op = register_op(
    "group_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "ScalarType weight_dtype, ScalarType bias_dtype, bool[] needs) -> (Tensor, Tensor, Tensor)",
    backward,
    fake=_backward_fake,
    cost=backward_cost,
)

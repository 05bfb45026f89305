"""What softmax and log_softmax share: kernels, launchers, registration with torch, costs.

A row up to MAX_BLOCK columns is held in registers. A wider one is read twice, the second time from
L2 and from its end on, where it was read last; its maximum and sum are kept by each thread for its
own columns and meet once, so that no tile waits at a barrier.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton.language as tl

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.launch import launch_gpu
from nearlight.core.pointwise import merge_dims
from nearlight.core.register import register_op
from nearlight.core.row_config import RowConfig
from nearlight.core.rows import FEW_COLUMNS, accumulator_pipe, as_rows, triton_accumulator
from nearlight.core.triton import jit


@jit
def exp(x, ACC: tl.constexpr):
    """Return eˣ in three instructions: `tl.exp` spends three more on results below 1e-38."""
    if ACC == tl.float32:
        return tl.exp2(x * 1.4426950408889634)
    else:
        return tl.exp(x)


@jit
def _mask_rows(mask_ptr, rows, SIZE_1, SIZE_2, stride_0, stride_1, stride_2):
    """Return where the mask of each row starts; rows lie in up to three dimensions."""
    outer = rows // SIZE_2
    inner = outer % SIZE_1 * stride_1 + rows % SIZE_2 * stride_2
    return mask_ptr + (outer // SIZE_1 * stride_0 + inner)


@jit
def _masked(scores, mask_ptr, mask_stride_n, cols, is_inside, ACC: tl.constexpr):
    """Return scores with the mask in them, −inf where it or the end of the row takes them out."""
    is_out = is_inside == 0
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + cols.to(tl.int64) * mask_stride_n, is_inside, other=0)
        if mask_ptr.dtype.element_ty == tl.int1:
            is_out = is_out | (mask == 0)
        else:
            scores += mask.to(ACC)
            is_out = is_out | (mask == -float("inf"))
    return tl.where(is_out, -float("inf"), scores), is_out


@jit
def _scores(
    x_ptr, mask_ptr, mask_stride_n, cols, is_inside,
    SCALE: tl.constexpr, ACC: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Return a tile of what the softmax is taken of, and what is taken out of it."""
    scores = tl.load(x_ptr + cols, is_inside, other=0.0, eviction_policy=POLICY).to(ACC)
    if SCALE != 1.0:
        scores *= SCALE
    return _masked(scores, mask_ptr, mask_stride_n, cols, is_inside, ACC)


@jit
def _normalized(scores, is_out, maximum, total, LOG: tl.constexpr, ACC: tl.constexpr):
    """Return the softmax or its logarithm; 0 or −inf of what is taken out."""
    if LOG:
        return tl.where(is_out, scores, scores - maximum - tl.log(total))
    else:
        return tl.where(is_out, 0.0, exp(scores - maximum, ACC) * (1.0 / total))


@jit
def _softmax_fwd_kernel(
    x_ptr, mask_ptr, y_ptr,
    num_rows, stride_x, SIZE_1, SIZE_2, stride_0, stride_1, stride_2, mask_stride_n,
    N: tl.constexpr, SCALE: tl.constexpr, LOG: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    is_inside = (rows < num_rows) & (cols < N)
    row_mask_ptr = None
    if mask_ptr is not None:
        row_mask_ptr = _mask_rows(mask_ptr, rows, SIZE_1, SIZE_2, stride_0, stride_1, stride_2)
    x_row_ptr = x_ptr + rows * stride_x
    scores, is_out = _scores(
        x_row_ptr, row_mask_ptr, mask_stride_n, cols, is_inside, SCALE, ACC, ""
    )
    maximum = tl.max(scores, axis=1)[:, None]
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(exp(scores - maximum, ACC), axis=1)[:, None]
    y = _normalized(scores, is_out, maximum, total, LOG, ACC)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), is_inside)


@jit
def _softmax_fwd_wide_kernel(
    x_ptr, mask_ptr, y_ptr,
    stride_x, SIZE_1, SIZE_2, stride_0, stride_1, stride_2, mask_stride_n, N,
    SCALE: tl.constexpr, LOG: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    NUM_TILES = tl.cdiv(N, BLOCK_R * BLOCK_C)  # no constant: it would be unrolled, and spill
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr, row_mask_ptr = x_ptr + row * stride_x, None
    if mask_ptr is not None:
        row_mask_ptr = _mask_rows(mask_ptr, row, SIZE_1, SIZE_2, stride_0, stride_1, stride_2)
    places = tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    maximum = tl.full([BLOCK_C], -float("inf"), ACC)
    total = tl.zeros([BLOCK_C], ACC)
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        cols = tile * (BLOCK_R * BLOCK_C) + places
        scores, is_out = _scores(
            x_row_ptr, row_mask_ptr, mask_stride_n, cols, cols < N, SCALE, ACC, "evict_last"
        )
        before = maximum
        maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        finite = tl.where(maximum == -float("inf"), 0.0, maximum)
        shares = tl.sum(exp(scores - finite[None, :], ACC), axis=0)
        total = total * exp(before - finite, ACC) + shares
    row_maximum = tl.max(maximum, axis=0)
    row_maximum = tl.where(row_maximum == -float("inf"), 0.0, row_maximum)
    row_total = tl.sum(total * exp(maximum - row_maximum, ACC), axis=0)
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        cols = (NUM_TILES - 1 - tile) * (BLOCK_R * BLOCK_C) + places
        scores, is_out = _scores(
            x_row_ptr, row_mask_ptr, mask_stride_n, cols, cols < N, SCALE, ACC, "evict_first"
        )
        y = _normalized(scores, is_out, row_maximum, row_total, LOG, ACC)
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + cols, y, cols < N, eviction_policy="evict_first")


@jit
def _upstream(
    dy_ptr, mask_ptr, mask_stride_n, cols, is_inside, ACC: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """Return a tile of the upstream gradient without what is taken out, and where that is.

    Only the logarithm has need of the mask: the softmax itself is 0 there.
    """
    dy = tl.load(dy_ptr + cols, is_inside, other=0.0, eviction_policy=POLICY).to(ACC)
    if mask_ptr is None:
        return dy, is_inside == 0
    else:
        _score, is_out = _masked(dy, mask_ptr, mask_stride_n, cols, is_inside, ACC)
        return tl.where(is_out, 0.0, dy), is_out


@jit
def _precise_exp(x, ACC: tl.constexpr):
    """Return eˣ for x ≤ 0 to the last bits, which `exp` loses where x is not small."""
    if ACC == tl.float32:
        x = tl.where(x < -104.0, -104.0, x)
        power = tl.floor(x * 1.4426950408889634 + 0.5)
        # ln 2 in two parts, of which the first has few enough bits for an exact product.
        x = (x - power * 0.693145751953125) - power * 1.4286068203094172e-06
        return tl.exp2(power) * exp(x, ACC)
    else:
        return exp(x, ACC)


@jit
def _terms(dy, y, LOG: tl.constexpr):
    """Return what is summed for the gradient of a row, in two parts, and what it is shifted by.

    Of the softmax, where one element has more than half: the gradient follows from the rest and its
    differences to that element. Its own 1 − y would cancel the digits of a confident row.
    """
    if LOG:
        return dy, tl.zeros_like(dy), tl.zeros_like(dy)
    else:
        is_most = y > 0.5
        rest = tl.where(is_most, 0.0, y)
        return dy * rest, rest, tl.where(is_most, dy, 0.0)


@jit
def _gradient(
    dy, y, is_out, total, rest, shift, SCALE: tl.constexpr, LOG: tl.constexpr,
    IS_HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the gradient of x, 0 where it is taken out, also if the rest of the row is NaN."""
    if LOG:
        share = exp(y, ACC) if IS_HALF else _precise_exp(y, ACC)
        return tl.where(is_out, 0.0, (dy - share * total) * SCALE)
    else:
        # What one element leaves to the others is nothing where 64 bits would show nothing.
        pull = tl.where(rest < 1e-15, 0.0, total - shift * rest)
        return tl.where(y == 0.0, 0.0, y * ((dy - shift) - pull) * SCALE)


@jit
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr,
    num_rows, stride_dy, stride_y, SIZE_1, SIZE_2, stride_0, stride_1, stride_2, mask_stride_n,
    N: tl.constexpr, SCALE: tl.constexpr, LOG: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    is_inside = (rows < num_rows) & (cols < N)
    row_mask_ptr = None
    if mask_ptr is not None:
        row_mask_ptr = _mask_rows(mask_ptr, rows, SIZE_1, SIZE_2, stride_0, stride_1, stride_2)
    dy_row_ptr = dy_ptr + rows * stride_dy
    dy, is_out = _upstream(dy_row_ptr, row_mask_ptr, mask_stride_n, cols, is_inside, ACC, "")
    y = tl.load(y_ptr + rows * stride_y + cols, is_inside, other=0.0).to(ACC)
    terms, rests, shifts = _terms(dy, y, LOG)
    total, rest = tl.sum(terms, axis=1)[:, None], tl.sum(rests, axis=1)[:, None]
    shift = tl.sum(shifts, axis=1)[:, None]
    IS_HALF: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    dx = _gradient(dy, y, is_out, total, rest, shift, SCALE, LOG, IS_HALF, ACC)
    tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), is_inside)


@jit
def _softmax_bwd_wide_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr,
    stride_dy, stride_y, SIZE_1, SIZE_2, stride_0, stride_1, stride_2, mask_stride_n, N,
    SCALE: tl.constexpr, LOG: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    NUM_TILES = tl.cdiv(N, BLOCK_R * BLOCK_C)  # no constant: it would be unrolled, and spill
    row = tl.program_id(0).to(tl.int64)
    dy_row_ptr, y_row_ptr, row_mask_ptr = dy_ptr + row * stride_dy, y_ptr + row * stride_y, None
    if mask_ptr is not None:
        row_mask_ptr = _mask_rows(mask_ptr, row, SIZE_1, SIZE_2, stride_0, stride_1, stride_2)
    places = tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    IS_HALF: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    total = tl.zeros([BLOCK_C], ACC)
    rest, shift = total, total
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        cols = tile * (BLOCK_R * BLOCK_C) + places
        dy, is_out = _upstream(
            dy_row_ptr, row_mask_ptr, mask_stride_n, cols, cols < N, ACC, "evict_last"
        )
        y = dy
        if not LOG:
            y = tl.load(y_row_ptr + cols, cols < N, other=0.0, eviction_policy="evict_last").to(ACC)
        terms, rests, shifts = _terms(dy, y, LOG)
        total += tl.sum(terms, axis=0)
        rest += tl.sum(rests, axis=0)
        shift += tl.sum(shifts, axis=0)
    row_total, row_rest, row_shift = tl.sum(total, 0), tl.sum(rest, 0), tl.sum(shift, 0)
    for tile in tl.range(0, NUM_TILES, num_stages=NUM_STAGES):
        cols = (NUM_TILES - 1 - tile) * (BLOCK_R * BLOCK_C) + places
        dy, is_out = _upstream(
            dy_row_ptr, row_mask_ptr, mask_stride_n, cols, cols < N, ACC, "evict_first"
        )
        y = tl.load(y_row_ptr + cols, cols < N, other=0.0, eviction_policy="evict_first").to(ACC)
        dx = _gradient(dy, y, is_out, row_total, row_rest, row_shift, SCALE, LOG, IS_HALF, ACC)
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * N + cols, dx, cols < N, eviction_policy="evict_first")


def _mask_sizes(x: torch.Tensor, mask: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the mask, and the sizes and strides by which a kernel finds it from a row's number."""
    if mask is None or x.ndim == 0:
        return mask, 1, 1, 0, 0, 0, 0
    spread = mask.expand(x.shape)
    steps = [1] * (x.ndim - 1)
    for dim in range(x.ndim - 3, -1, -1):
        steps[dim] = steps[dim + 1] * x.shape[dim + 1]
    dims = merge_dims(x.shape[:-1], steps, spread.stride()[:-1])
    if len(dims) > 3:
        return _mask_sizes(x, spread.contiguous())
    outer, middle, inner = [(1, 0, 0)] * (3 - len(dims)) + dims
    return mask, middle[0], inner[0], outer[2], middle[2], inner[2], spread.stride(-1)


def _launch(
    both: tuple[Any, Any], chosen: RowConfig, rows: torch.Tensor, *arguments: Any, **constants: Any
) -> None:
    """Launch the kernel of held rows, which takes their number first, or that of wider ones."""
    num_rows, width = rows.shape
    constants |= {"ACC": triton_accumulator(rows.dtype), "num_warps": chosen.num_warps}
    # The gradient of a single class is exactly zero, without the noise of one rounding less.
    constants["enable_fp_fusion"] = width > FEW_COLUMNS
    tensors = [each for each in arguments if not isinstance(each, int)]
    numbers = [each for each in arguments if isinstance(each, int)]
    if chosen.block_n >= width:
        constants |= {"N": width, "BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n}
        both[0][(chosen.num_programs,)](*tensors, num_rows, *numbers, **constants)
    else:
        lanes = min(chosen.block_n, 32 * chosen.num_warps * 16 // rows.dtype.itemsize)
        constants |= {"BLOCK_R": chosen.block_n // lanes, "BLOCK_C": lanes}
        both[1][(num_rows,)](*tensors, *numbers, width, NUM_STAGES=chosen.num_stages, **constants)


def forward(
    config: Callable[..., RowConfig],
    is_log: bool,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the softmax of scaled and masked rows, or its logarithm, contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    rows = as_rows(x)
    chosen = config(tuple(rows.shape), x.dtype, launch_gpu(x.device), "forward")
    both = _softmax_fwd_kernel, _softmax_fwd_wide_kernel
    mask, *sizes = _mask_sizes(x, mask)
    _launch(both, chosen, rows, rows, mask, y, rows.stride(0), *sizes, SCALE=scale, LOG=is_log)
    return y


def backward(
    config: Callable[..., RowConfig],
    is_log: bool,
    dy: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the gradient of x from that of y, y itself and, for the logarithm, the mask."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        return dx
    dy_rows, y_rows = as_rows(dy), as_rows(y)
    chosen = config(tuple(y_rows.shape), y.dtype, launch_gpu(y.device), "backward")
    both = _softmax_bwd_kernel, _softmax_bwd_wide_kernel
    mask, *sizes = _mask_sizes(y, mask)
    numbers = dy_rows.stride(0), y_rows.stride(0), *sizes
    _launch(both, chosen, y_rows, dy_rows, y_rows, mask, dx, *numbers, SCALE=scale, LOG=is_log)
    return dx


def forward_cost(args: Sequence[Any], kwargs: Mapping[str, Any], y: torch.Tensor) -> Cost:
    """Count x and the mask read and y written once."""
    read = sum(tensor_bytes(tensor) for tensor in args[:2] if tensor is not None)
    flops = {accumulator_pipe(y.dtype): 5 * y.numel()}
    return Cost(flops=flops, bytes_read=read, bytes_written=tensor_bytes(y))


def backward_cost(args: Sequence[Any], kwargs: Mapping[str, Any], dx: torch.Tensor) -> Cost:
    """Count dy, y and the mask read and dx written once."""
    read = sum(tensor_bytes(tensor) for tensor in args[:3] if tensor is not None)
    flops = {accumulator_pipe(dx.dtype): 5 * dx.numel()}
    return Cost(flops=flops, bytes_read=read, bytes_written=tensor_bytes(dx))


def register(op: str, config: Callable[..., RowConfig], is_log: bool) -> Callable[..., Any]:
    """Register an op's forward and backward with torch and return what to call."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output, inputs[1] if is_log else None)
        ctx.scale = inputs[2]

    def differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return backward_op(dy, *ctx.saved_tensors, ctx.scale), None, None

    forward_op = register_op(
        f"{op}_fwd(Tensor x, Tensor? mask, float scale) -> Tensor",
        partial(forward, config, is_log),
        fake=lambda x, mask, scale: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        cost=forward_cost,
        backward=differentiate,
        save=save,
        is_static=True,
    )
    backward_op = register_op(
        f"{op}_bwd(Tensor dy, Tensor y, Tensor? mask, float scale) -> Tensor",
        partial(backward, config, is_log),
        fake=lambda dy, y, mask, scale: torch.empty(y.shape, dtype=y.dtype, device=y.device),
        cost=backward_cost,
        is_static=True,
    )
    return forward_op

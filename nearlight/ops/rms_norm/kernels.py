"""The kernels of RMSNorm and how they are launched."""

from __future__ import annotations

import triton.language as tl

from nearlight.core.row_config import tunable_config
from nearlight.core.triton import jit
from nearlight.ops._add_residual import add_residual, store_dx

config = tunable_config("rms_norm")


@jit
def _rms_norm_fwd_kernel(
    x_ptr,  # (num_rows, N), rows `stride_x` apart
    weight_ptr,  # (N,) or None
    y_ptr,  # (num_rows, N), contiguous
    rstd_ptr,  # (num_rows,)
    residual_ptr,  # (num_rows, N) added to x first, or None
    sum_ptr,  # (num_rows, N), contiguous: that sum
    stride_x,
    stride_residual,
    num_rows,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask, other=0.0).to(ACC)
    if residual_ptr is not None:
        row, col = rows[:, None], cols[None, :]
        x = add_residual(x, residual_ptr, sum_ptr, row, col, stride_residual, N, mask, ACC)
    if weight_ptr is not None:  # on its way while the sum waits at its barrier
        weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + EPS)
    tl.store(rstd_ptr + rows, rstd, rows < num_rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        if ROUND:
            y = y.to(x_ptr.dtype.element_ty).to(ACC)
        y *= (weight.to(ACC) + OFFSET)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y, mask)


@jit
def _rms_norm_fwd_wide_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    residual_ptr,
    sum_ptr,
    stride_x,
    stride_residual,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N,), ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + block
        x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        if residual_ptr is not None:
            x = add_residual(x, residual_ptr, sum_ptr, row, cols, stride_residual, N, cols < N, ACC)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + EPS)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + block
        if sum_ptr is not None:  # stored before the barrier of the sum over the row
            x = tl.load(sum_ptr + row * N + cols, cols < N, other=0.0).to(ACC)
        else:
            x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        y = x * rstd
        if weight_ptr is not None:
            if ROUND:
                y = y.to(x_ptr.dtype.element_ty).to(ACC)
            y *= tl.load(weight_ptr + cols, cols < N, other=0.0).to(ACC) + OFFSET
        tl.store(y_ptr + row * N + cols, y, cols < N)


@jit
def _rms_norm_bwd_projection_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,  # (num_rows,): mean(x̂ · dy · scale), for rows too wide for one tile
    stride_dy,
    stride_x,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK_N,), ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + row * stride_dy + cols, cols < N, other=0.0).to(ACC)
        if weight_ptr is not None:
            dy *= tl.load(weight_ptr + cols, cols < N, other=0.0).to(ACC) + OFFSET
        products += x * rstd * dy  # without rstd the sum may overflow
    tl.store(projection_ptr + row, tl.sum(products, axis=0) / N)


@jit
def _rms_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    projection_ptr,  # or None: the tile holds whole rows
    dx_ptr,  # (num_rows, N), contiguous, or None
    partials_ptr,  # (row groups, N) sums of the weight gradient, or None
    dsum_ptr,  # (num_rows, N) added to dx, or None
    dresidual_ptr,  # (num_rows, N), contiguous: dx in a dtype of its own, or None
    stride_dy,
    stride_x,
    stride_dsum,
    num_rows,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    ACC: tl.constexpr,
    HOLD: tl.constexpr,  # else the sums leave no registers for the weight: read again, from L2
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    row_step = (tl.num_programs(0) // NUM_BLOCKS).to(tl.int64) * BLOCK_M
    cols = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    if weight_ptr is not None and HOLD:
        weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in tl.range(group * BLOCK_M, num_rows, row_step, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + rows, rows < num_rows, other=0.0)
        normed = x * rstd[:, None]
        if partials_ptr is not None:
            dweight += dy * normed
        if dx_ptr is not None:
            if weight_ptr is not None:
                if not HOLD:
                    weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
                dy *= (weight.to(ACC) + OFFSET)[None, :]
            if projection_ptr is None:
                projection = tl.sum(normed * dy, axis=1) / N
            else:
                projection = tl.load(projection_ptr + rows, rows < num_rows, other=0.0)
            dx = (dy - normed * projection[:, None]) * rstd[:, None]
            store_dx(dx, dx_ptr, dsum_ptr, dresidual_ptr, rows, cols, stride_dsum, N, mask, ACC)
    if partials_ptr is not None:
        tl.store(partials_ptr + group * N + cols, tl.sum(dweight, axis=0), cols < N)

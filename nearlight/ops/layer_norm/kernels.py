"""The kernels of LayerNorm and how they are launched."""

from __future__ import annotations

import triton.language as tl

from nearlight.core.row_config import tunable_config
from nearlight.core.triton import jit
from nearlight.ops._add_residual import add_residual, store_dx

# Three sums one after the other: with half the warps twice as many rows are in flight.
config = tunable_config("layer_norm", num_sums=2, elements_per_thread=64)


@jit
def _layer_norm_fwd_kernel(
    x_ptr,  # (num_rows, N), rows `stride_x` apart
    weight_ptr,  # (N,) or None
    bias_ptr,  # (N,) or None
    y_ptr,  # (num_rows, N), contiguous
    mean_ptr,  # (num_rows,)
    rstd_ptr,  # (num_rows,)
    residual_ptr,  # (num_rows, N) added to x first, or None
    sum_ptr,  # (num_rows, N), contiguous: that sum
    stride_x,
    stride_residual,
    num_rows,
    N: tl.constexpr,
    EPS: tl.constexpr,
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
    if weight_ptr is not None:  # on its way while the sums wait at their barriers
        weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
    # x² − mean² would lose the variance where the mean is large, and so would a mean that is off
    # in its last digit: both come from differences to a first mean.
    first = tl.sum(x, axis=1) / N
    centred = tl.where(mask, x - first[:, None], 0.0)
    rest = tl.sum(centred, axis=1) / N
    square = tl.sum(centred * centred, axis=1) / N
    # Past the largest number rest² may be, too: inf − inf. As the variance inf makes y 0.
    variance = tl.where(square == float("inf"), square, square - rest * rest)
    rstd = tl.rsqrt(variance + EPS)
    tl.store(mean_ptr + rows, first + rest, rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, rows < num_rows)
    y = (centred - rest[:, None]) * rstd[:, None]
    if weight_ptr is not None:
        y *= weight.to(ACC)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, cols < N, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y, mask)


@jit
def _layer_norm_fwd_wide_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    residual_ptr,
    sum_ptr,
    stride_x,
    stride_residual,
    N: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_N)
    # Welford's update for each of BLOCK_N columns alone, all of them put together at the end.
    means = tl.zeros((BLOCK_N,), ACC)
    squares = tl.zeros((BLOCK_N,), ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + block
        x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        if residual_ptr is not None:
            x = add_residual(x, residual_ptr, sum_ptr, row, cols, stride_residual, N, cols < N, ACC)
        delta = tl.where(cols < N, x - means, 0.0)
        means += delta / (start // BLOCK_N + 1)
        squares += delta * tl.where(cols < N, x - means, 0.0)
    counts = ((N - 1 - block) // BLOCK_N + 1).to(ACC)
    mean = tl.sum(means * counts, axis=0) / N
    mean += tl.sum((means - mean) * counts, axis=0) / N  # the last digit, as above
    between = (means - mean) * (means - mean) * counts
    rstd = tl.rsqrt(tl.sum(squares + between, axis=0) / N + EPS)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + block
        if sum_ptr is not None:  # stored before the barrier of the sum over the row
            x = tl.load(sum_ptr + row * N + cols, cols < N, other=0.0).to(ACC)
        else:
            x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + cols, cols < N, other=0.0).to(ACC)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + cols, cols < N, other=0.0).to(ACC)
        tl.store(y_ptr + row * N + cols, y, cols < N)


@jit
def _layer_norm_bwd_projection_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    projections_ptr,  # (2, num_rows): mean(x̂ · dy · weight) and mean(dy · weight)
    stride_dy,
    stride_x,
    N: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((BLOCK_N,), ACC)
    gradients = tl.zeros((BLOCK_N,), ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, cols < N, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + row * stride_dy + cols, cols < N, other=0.0).to(ACC)
        if weight_ptr is not None:
            dy *= tl.load(weight_ptr + cols, cols < N, other=0.0).to(ACC)
        products += (x - mean) * rstd * dy  # without rstd the sum may overflow
        gradients += dy
    tl.store(projections_ptr + row, tl.sum(products, axis=0) / N)
    tl.store(projections_ptr + tl.num_programs(0) + row, tl.sum(gradients, axis=0) / N)


@jit
def _layer_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    projections_ptr,  # or None: the tile holds whole rows
    dx_ptr,  # (num_rows, N), contiguous, or None
    dweights_ptr,  # (row groups, N) sums of the weight gradient, or None
    dbiases_ptr,  # (row groups, N) sums of the bias gradient, or None
    dsum_ptr,  # (num_rows, N) added to dx, or None
    dresidual_ptr,  # (num_rows, N), contiguous: dx in a dtype of its own, or None
    stride_dy,
    stride_x,
    stride_dsum,
    num_rows,
    N: tl.constexpr,
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
    dweight, dbias = tl.zeros((BLOCK_M, BLOCK_N), ACC), tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in tl.range(group * BLOCK_M, num_rows, row_step, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask, other=0.0).to(ACC)
        mean = tl.load(mean_ptr + rows, rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, rows < num_rows, other=0.0)
        # Past the row's end x̂ is −mean · rstd, but dy is zero there and takes it out of all sums.
        normed = (x - mean[:, None]) * rstd[:, None]
        if dweights_ptr is not None:
            dweight += dy * normed
        if dbiases_ptr is not None:
            dbias += dy
        if dx_ptr is not None:
            if weight_ptr is not None:
                if not HOLD:
                    weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
                dy *= weight.to(ACC)[None, :]
            if projections_ptr is None:
                along = tl.sum(normed * dy, axis=1) / N
                level = tl.sum(dy, axis=1) / N
            else:
                along = tl.load(projections_ptr + rows, rows < num_rows, other=0.0)
                level = tl.load(projections_ptr + num_rows + rows, rows < num_rows, other=0.0)
            dx = (dy - level[:, None] - normed * along[:, None]) * rstd[:, None]
            store_dx(dx, dx_ptr, dsum_ptr, dresidual_ptr, rows, cols, stride_dsum, N, mask, ACC)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + group * N + cols, tl.sum(dweight, axis=0), cols < N)
    if dbiases_ptr is not None:
        tl.store(dbiases_ptr + group * N + cols, tl.sum(dbias, axis=0), cols < N)

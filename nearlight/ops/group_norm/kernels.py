"""The kernels of group normalisation and how they are tiled.

A tensor is (N, C, S), its channels or its positions side by side in memory; a tile is some channels
of one sample at some positions. What is summed over a group goes by way of partial sums: one per
sample, piece of the positions, and channel.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable


@dataclass(frozen=True)
class Config:
    """A tile, the positions of a partial sum (whole tiles), and the warps."""

    block_c: int
    block_s: int
    piece: int
    num_warps: int


def _config(
    shape: tuple[int, int, int],
    channels_last: bool,
    elements: int,
    num_programs: int,
    num_warps: int,
) -> Config:
    samples, channels, positions = shape
    widest_c, widest_s = (triton.next_power_of_2(size) for size in (channels, positions))
    # Rows of 64 channels are whole cache lines, and leave tiles enough of small tensors.
    block_c = min(widest_c, max(64 if channels_last else 1, elements // widest_s))
    block_s = min(widest_s, elements // block_c)
    num_tiles = triton.cdiv(positions, block_s)
    programs = samples * triton.cdiv(channels, block_c)
    num_pieces = min(num_tiles, triton.cdiv(num_programs, programs))
    return Config(block_c, block_s, triton.cdiv(num_tiles, num_pieces) * block_s, num_warps)


def candidates(
    shape: tuple[int, int, int], dtype: torch.dtype, gpu: Gpu | None, channels_last: bool
) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    return dict.fromkeys(
        (
            _config(shape, channels_last, 512 * num_warps * scale, gpu.num_sms * waves, num_warps)
            for num_warps, scale, waves in product((4, 8), (1, 2), (4, 8, 16))
        ),
        "",
    )


@tunable("group_norm", candidates)
def config(
    shape: tuple[int, int, int], dtype: torch.dtype, gpu: Gpu | None, channels_last: bool
) -> Config:
    """Choose the launch for (N, C, S) on a GPU, or for the interpreter where `gpu` is None."""
    if gpu is None:  # a program costs the same whatever its tile
        return _config(shape, channels_last, 1 << 14, 4, 4)
    return _config(shape, channels_last, 2048, gpu.num_sms * 8, 4)


@jit
def _place(C, S, PIECE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return this program's sample, channels, and begin and end of its positions."""
    num_pieces, num_blocks = tl.cdiv(S, PIECE), tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)  # divided in 32 bits: in 64 a division is a call
    begin = (pid % num_pieces).to(tl.int64) * PIECE
    c = (pid // num_pieces % num_blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = (pid // num_pieces // num_blocks).to(tl.int64)
    return n, c, begin, tl.minimum(begin + PIECE, S)


@jit
def _shift(
    x_ptr, n, group, exists, S, x_stride_n, x_stride_c, x_stride_s,
    GROUP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return an element of each group where some of it lie close together, far from 0; else 0.

    Moments around it keep their digits where the mean is far above the deviation; where it is not,
    an element would cost the mean some.
    """
    i = tl.arange(0, 8).to(tl.int64)
    at = x_ptr + (n * x_stride_n + group * GROUP * x_stride_c)[:, None]
    at += (i % GROUP * x_stride_c + i * S // 8 * x_stride_s)[None, :]
    x = tl.load(at, exists[:, None], other=0.0).to(ACC)
    low, high = tl.min(x, axis=1), tl.max(x, axis=1)
    return tl.where(high - low <= 0.125 * tl.abs(high), low, 0.0)


@jit
def _per_group(ptr, n, c, C, GROUP: tl.constexpr):
    """Return what belongs to the group of each channel."""
    return tl.load(ptr + n * (C // GROUP) + c // GROUP, c < C, other=0.0)[:, None]


@jit
def _per_channel(ptr, c, C, ACC: tl.constexpr):
    """Return a parameter of each channel."""
    return tl.load(ptr + c, c < C, other=0.0).to(ACC)[:, None]


@jit
def _group_norm_moments_kernel(
    x_ptr, partials_ptr, C, S, num_sums, x_stride_n, x_stride_c, x_stride_s,
    GROUP: tl.constexpr, PIECE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write the mean, less the group's shift, and the sum of squares around it."""
    n, c, begin, end = _place(C, S, PIECE, BLOCK_C)
    lane = tl.arange(0, BLOCK_S)
    row_ptr = x_ptr + n * x_stride_n
    shift = _shift(
        x_ptr, n, c // GROUP, c < C, S, x_stride_n, x_stride_c, x_stride_s, GROUP, ACC
    )  # fmt: skip
    mean = tl.zeros((BLOCK_C, BLOCK_S), ACC)
    squares = tl.zeros((BLOCK_C, BLOCK_S), ACC)
    # Welford's recurrence in each lane; nothing is reduced before the end.
    for start in range(begin, end, BLOCK_S):
        s = start + lane
        mask = (c < C)[:, None] & (s < end)[None, :]
        x_at = row_ptr + c[:, None] * x_stride_c + s[None, :] * x_stride_s
        x = tl.load(x_at, mask, other=0.0).to(ACC) - shift[:, None]
        step = tl.where(mask, x - mean, 0.0)
        mean += step * (1.0 / ((start - begin) // BLOCK_S + 1).to(ACC))
        squares += step * (x - mean)
    count = ((tl.maximum(end - begin - lane, 0) + BLOCK_S - 1) // BLOCK_S).to(ACC)[None, :]
    whole = tl.sum(mean * count, axis=1) / (end - begin).to(ACC)
    apart = mean - whole[:, None]
    at = (n * tl.cdiv(S, PIECE) + begin // PIECE) * C + c
    tl.store(partials_ptr + at, whole, c < C)
    deviation = tl.sum(squares + count * apart * apart, axis=1)
    tl.store(partials_ptr + num_sums + at, deviation, c < C)


@jit
def _groups(C, S, num_groups, PIECE: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return the samples and groups of this program, whether they exist, their first sums."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    n, group = at // (C // GROUP), at % (C // GROUP)
    return at, n, group, at < num_groups, n * tl.cdiv(S, PIECE) * C + group * GROUP


@jit
def _sums_of(start, base, exists, C, S, PIECE: tl.constexpr, GROUP: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Return the places of some partial sums of each group, their mask, channels, positions."""
    i = start + tl.arange(0, BLOCK).to(tl.int64)
    mask = exists[:, None] & (i < tl.cdiv(S, PIECE) * GROUP)[None, :]
    at = base[:, None] + (i // GROUP * C + i % GROUP)[None, :]
    return at, mask, i % GROUP, tl.minimum(S - i // GROUP * PIECE, PIECE)


@jit
def _group_norm_combine_kernel(
    x_ptr, partials_ptr, mean_ptr, rstd_ptr, num_groups, C, S, num_sums,
    x_stride_n, x_stride_c, x_stride_s,
    EPS: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make the mean and rstd of groups out of their partial ones, weighted by their positions."""
    place, n, group, exists, base = _groups(C, S, num_groups, PIECE, GROUP, BLOCK_G)
    # A division is a call, which spills what is live around it: one, before anything is.
    share = 1.0 / ((tl.zeros((), tl.int64) + S).to(tl.float64) * GROUP)
    # In fp64: they are few, and what the mean errs stands in every element.
    sums = tl.zeros((BLOCK_G, BLOCK), tl.float64)
    for start in range(0, tl.cdiv(S, PIECE) * GROUP, BLOCK):
        at, mask, _c, count = _sums_of(start, base, exists, C, S, PIECE, GROUP, BLOCK)
        sums += tl.load(partials_ptr + at, mask, other=0.0) * count.to(tl.float64)[None, :]
    mean = tl.sum(sums, axis=1) * share
    squares = tl.zeros((BLOCK_G, BLOCK), tl.float64)
    for start in range(0, tl.cdiv(S, PIECE) * GROUP, BLOCK):
        at, mask, _c, count = _sums_of(start, base, exists, C, S, PIECE, GROUP, BLOCK)
        apart = tl.load(partials_ptr + at, mask, other=0.0) - mean[:, None]
        within = tl.load(partials_ptr + num_sums + at, mask, other=0.0)
        squares += tl.where(mask, within + count.to(tl.float64)[None, :] * apart * apart, 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) * share + EPS)
    shift = _shift(
        x_ptr, n, group, exists, S, x_stride_n, x_stride_c, x_stride_s, GROUP, ACC
    )  # fmt: skip
    mean += shift.to(tl.float64)
    rounded = mean.to(ACC)
    tl.store(mean_ptr + place, rounded, exists)
    tl.store(mean_ptr + num_groups + place,
             mean - rounded.to(tl.float64), exists)  # fmt: skip
    tl.store(rstd_ptr + place, rstd, exists)


@jit
def _group_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, y_ptr, num_groups, C, S,
    x_stride_n, x_stride_c, x_stride_s, y_stride_n, y_stride_c, y_stride_s,
    GROUP: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    n, c, begin, _ = _place(C, S, BLOCK_S, BLOCK_C)
    s = begin + tl.arange(0, BLOCK_S)
    mask = (c < C)[:, None] & (s < S)[None, :]
    x_at = x_ptr + n * x_stride_n + c[:, None] * x_stride_c + s[None, :] * x_stride_s
    x = tl.load(x_at, mask, other=0.0).to(ACC)
    mean = _per_group(mean_ptr, n, c, C, GROUP)
    rest = _per_group(mean_ptr + num_groups, n, c, C, GROUP)
    rstd = _per_group(rstd_ptr, n, c, C, GROUP)
    y = (x - mean - rest) * rstd
    if weight_ptr is not None:
        y *= _per_channel(weight_ptr, c, C, ACC)
    if bias_ptr is not None:
        y += _per_channel(bias_ptr, c, C, ACC)
    y_at = y_ptr + n * y_stride_n + c[:, None] * y_stride_c + s[None, :] * y_stride_s
    tl.store(y_at, y, mask)


@jit
def _group_norm_bwd_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, partials_ptr, num_groups, C, S, num_sums,
    dy_stride_n, dy_stride_c, dy_stride_s, x_stride_n, x_stride_c, x_stride_s,
    GROUP: tl.constexpr, PIECE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sum dy · x̂ and dy of each channel over a piece of the positions."""
    n, c, begin, end = _place(C, S, PIECE, BLOCK_C)
    mean = _per_group(mean_ptr, n, c, C, GROUP)
    rest = _per_group(mean_ptr + num_groups, n, c, C, GROUP)
    rstd = _per_group(rstd_ptr, n, c, C, GROUP)
    products = tl.zeros((BLOCK_C, BLOCK_S), ACC)
    sums = tl.zeros((BLOCK_C, BLOCK_S), ACC)
    for start in range(0, (end - begin).to(tl.int32), BLOCK_S):
        s = begin + (start + tl.arange(0, BLOCK_S))
        mask = (c < C)[:, None] & (s < end)[None, :]
        x_at = x_ptr + n * x_stride_n + c[:, None] * x_stride_c + s[None, :] * x_stride_s
        dy_at = dy_ptr + n * dy_stride_n + c[:, None] * dy_stride_c + s[None, :] * dy_stride_s
        x = tl.load(x_at, mask, other=0.0).to(ACC)
        dy = tl.load(dy_at, mask, other=0.0).to(ACC)
        # Beyond the ends dy is 0, and x̂ finite where it is so within.
        products += dy * ((x - mean - rest) * rstd)
        sums += dy
    at = (n * tl.cdiv(S, PIECE) + begin // PIECE) * C + c
    tl.store(partials_ptr + at, tl.sum(products, axis=1), c < C)
    tl.store(partials_ptr + num_sums + at, tl.sum(sums, axis=1), c < C)


@jit
def _group_norm_bwd_combine_kernel(
    partials_ptr, weight_ptr, projections_ptr, num_groups, C, S, num_sums,
    GROUP: tl.constexpr, PIECE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the means of weight · dy · x̂ and weight · dy over groups."""
    place, _n, group, exists, base = _groups(C, S, num_groups, PIECE, GROUP, BLOCK_G)
    products = tl.zeros((BLOCK_G, BLOCK), ACC)
    sums = tl.zeros((BLOCK_G, BLOCK), ACC)
    for start in range(0, tl.cdiv(S, PIECE) * GROUP, BLOCK):
        at, mask, c, _count = _sums_of(start, base, exists, C, S, PIECE, GROUP, BLOCK)
        product = tl.load(partials_ptr + at, mask, other=0.0)
        plain = tl.load(partials_ptr + num_sums + at, mask, other=0.0)
        if weight_ptr is not None:
            weight_at = weight_ptr + group[:, None] * GROUP + c[None, :]
            weight = tl.load(weight_at, mask, other=0.0).to(ACC)
            product, plain = product * weight, plain * weight
        products += product
        sums += plain
    total = (tl.zeros((), tl.int64) + S).to(ACC) * GROUP
    tl.store(projections_ptr + place, tl.sum(products, axis=1) / total, exists)
    tl.store(projections_ptr + num_groups + place,
             tl.sum(sums, axis=1) / total, exists)  # fmt: skip


@jit
def _group_norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, projections_ptr, dx_ptr, num_groups, C, S,
    dy_stride_n, dy_stride_c, dy_stride_s, x_stride_n, x_stride_c, x_stride_s,
    dx_stride_n, dx_stride_c, dx_stride_s,
    GROUP: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    n, c, begin, _ = _place(C, S, BLOCK_S, BLOCK_C)
    s = begin + tl.arange(0, BLOCK_S)
    mask = (c < C)[:, None] & (s < S)[None, :]
    x_at = x_ptr + n * x_stride_n + c[:, None] * x_stride_c + s[None, :] * x_stride_s
    dy_at = dy_ptr + n * dy_stride_n + c[:, None] * dy_stride_c + s[None, :] * dy_stride_s
    x = tl.load(x_at, mask, other=0.0).to(ACC)
    dy = tl.load(dy_at, mask, other=0.0).to(ACC)
    mean = _per_group(mean_ptr, n, c, C, GROUP)
    rest = _per_group(mean_ptr + num_groups, n, c, C, GROUP)
    rstd = _per_group(rstd_ptr, n, c, C, GROUP)
    normed = (x - mean - rest) * rstd
    product = _per_group(projections_ptr, n, c, C, GROUP)
    plain = _per_group(projections_ptr + num_groups, n, c, C, GROUP)
    if weight_ptr is not None:
        dy *= _per_channel(weight_ptr, c, C, ACC)
    dx = (dy - plain - normed * product) * rstd
    dx_at = dx_ptr + n * dx_stride_n + c[:, None] * dx_stride_c + s[None, :] * dx_stride_s
    tl.store(dx_at, dx, mask)

"""The RoPE kernel, a program of which turns a tile of q or of k, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable


@dataclass(frozen=True)
class Config:
    """How the kernel is launched.

    Attributes:
        block_s: tokens of a tile.
        block_h: heads of a tile of q.
        block_hk: heads of a tile of k.
        block_half: pairs of a tile, all of a head's.
        share_angles: whether a tile loads each angle once and spreads it over its heads, or per
            head (from L1): then it lies in registers as q does. Spreading it would pass q and k
            through shared memory, behind eight barriers.
        num_warps: warps of a program.
    """

    block_s: int
    block_h: int
    block_hk: int
    block_half: int
    share_angles: bool
    num_warps: int


def _config(
    shape: tuple[int, int, int, int], elements: int, max_heads: int, gpu: Gpu | None, num_warps: int
) -> Config:
    tokens, heads, key_heads, half = (triton.next_power_of_2(max(size, 1)) for size in shape)
    block_h = min(max(heads, key_heads), max_heads, max(1, elements // half))
    block_s = min(tokens, max(1, elements // (half * block_h)))
    blocks_h = min(block_h, heads), min(block_h, key_heads)
    return Config(block_s, *blocks_h, half, gpu is None, num_warps)


def candidates(
    shape: tuple[int, int, int, int], dtype: torch.dtype, gpu: Gpu | None
) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    # One, two or four vectors of 16 bytes per thread and half.
    found = (
        _config(shape, 32 * num_warps * vectors * 16 // dtype.itemsize, max_heads, gpu, num_warps)
        for num_warps in (2, 4, 8)
        for vectors in (1, 2, 4)
        for max_heads in (4, 16, 64)
    )
    return dict.fromkeys(found, "")


@tunable("rope", candidates)
def config(shape: tuple[int, int, int, int], dtype: torch.dtype, gpu: Gpu | None) -> Config:
    """Choose the launch for (S, H, HK, R / 2) on a GPU, or for the interpreter where it is None."""
    if gpu is None:  # each program costs the same, whatever its tile
        return _config(shape, 1 << 18, 1 << 18, gpu, 4)
    # Two vectors of 16 bytes per thread and half; angles from L1 serve up to 16 heads.
    return _config(shape, 256 * 16 // dtype.itemsize, 16, gpu, 4)


@jit
def _load_pairs(
    at, stride, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr
):  # fmt: skip
    """Load the first and the second entry of each pair; NaN where masked."""
    nan: tl.constexpr = float("nan")
    if INTERLEAVED:
        # One load of both, taken apart in registers: loads of every other entry are half as wide.
        entry = tl.arange(0, 2 * BLOCK_HALF).to(tl.int64)[None, None, :]
        x = tl.load(at + entry * stride, mask & (entry < 2 * HALF), other=nan)
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_HALF, 2)))
    else:
        pair = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, None, :]
        pair_mask = mask & (pair < HALF)
        first = tl.load(at + pair * stride, pair_mask, other=nan)
        second = tl.load(at + (pair + HALF) * stride, pair_mask, other=nan)
    return first, second


@jit
def _store_pairs(
    at, first, second, stride, mask,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        entry = tl.arange(0, 2 * BLOCK_HALF).to(tl.int64)[None, None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_HALF))
        tl.store(at + entry * stride, x, mask & (entry < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, None, :]
        pair_mask = mask & (pair < HALF)
        tl.store(at + pair * stride, first, pair_mask)
        tl.store(at + (pair + HALF) * stride, second, pair_mask)


@jit
def _load_angles(
    at, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, IS_FULL: tl.constexpr,
    ACC: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Return the table's entries for both members of each pair, (tokens, 1 or heads, pairs)."""
    if IS_FULL:
        first, second = _load_pairs(at, 1, mask, HALF, INTERLEAVED, BLOCK_HALF)
        return first.to(ACC), second.to(ACC)
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    angle = tl.load(at + pair, mask & (pair < HALF), other=float("nan")).to(ACC)
    return angle, angle


@jit
def _rotate_tile(
    x_ptr, x_strides, out_ptr, out_strides, num_heads, head_tile, batch, tokens, is_token,
    cos_at, sin_at, is_row,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_FULL: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, SHARE_ANGLES: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    heads = (head_tile.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    mask = is_token & (heads < num_heads)
    x_at = x_ptr + (batch * x_strides[0] + tokens * x_strides[1] + heads * x_strides[2])
    out_at = out_ptr + (batch * out_strides[0] + tokens * out_strides[1] + heads * out_strides[2])
    # What is not turned goes first: its registers are free before the pairs need them.
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST).to(tl.int64)[None, None, :]
        rest_mask = mask & (rest < REST)
        x = tl.load(x_at + (rest + 2 * HALF) * x_strides[3], rest_mask)
        tl.store(out_at + (rest + 2 * HALF) * out_strides[3], x, rest_mask)
    # x first: its way from memory is the longest, that of the angles from L2 hides behind it.
    x1, x2 = _load_pairs(x_at, x_strides[3], mask, HALF, INTERLEAVED, BLOCK_HALF)
    if not SHARE_ANGLES:
        cos_at, sin_at, is_row = cos_at + heads * 0, sin_at + heads * 0, is_row & mask
    cos1, cos2 = _load_angles(cos_at, is_row, HALF, INTERLEAVED, IS_FULL, ACC, BLOCK_HALF)
    sin1, sin2 = _load_angles(sin_at, is_row, HALF, INTERLEAVED, IS_FULL, ACC, BLOCK_HALF)
    if IS_TRANSPOSED:  # the rotation by −angle, also where the table differs within a pair
        sin1, sin2 = -sin2, -sin1
    x1, x2 = x1.to(ACC), x2.to(ACC)
    first = (x1 * cos1 - x2 * sin1).to(out_ptr.dtype.element_ty)
    second = (x2 * cos2 + x1 * sin2).to(out_ptr.dtype.element_ty)
    _store_pairs(out_at, first, second, out_strides[3], mask, HALF, INTERLEAVED, BLOCK_HALF)


@jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, S, P, H, HK,
    q_stride_b, q_stride_s, q_stride_h, q_stride_d,
    k_stride_b, k_stride_s, k_stride_h, k_stride_d,
    q_out_stride_b, q_out_stride_s, q_out_stride_h, q_out_stride_d,
    k_out_stride_b, k_out_stride_s, k_out_stride_h, k_out_stride_d,
    table_stride_b, table_stride_s, positions_stride_b, positions_stride_s,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_FULL: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, SHARE_ANGLES: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HK: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    num_q_tiles = tl.cdiv(H, BLOCK_H)
    num_head_tiles = num_q_tiles + tl.cdiv(HK, BLOCK_HK)
    num_token_tiles = tl.cdiv(S, BLOCK_S)
    pid = tl.program_id(0)
    head_tile = pid % num_head_tiles
    token_tile = (pid // num_head_tiles % num_token_tiles).to(tl.int64)
    batch = (pid // num_head_tiles // num_token_tiles).to(tl.int64)
    tokens = (token_tile * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    is_token = tokens < S

    rows, is_row = tokens, is_token
    if positions_ptr is not None:
        positions_at = positions_ptr + batch * positions_stride_b + tokens * positions_stride_s
        rows = tl.load(positions_at, is_token, other=0).to(tl.int64)
        rows = tl.where(rows < 0, rows + P, rows)  # as torch counts from the end
        # A row outside of the table is read as NaN: for everybody to see, and in bounds.
        is_row = (rows >= 0) & (rows < P)
    table_offset = batch * table_stride_b + rows * table_stride_s
    if head_tile < num_q_tiles:
        _rotate_tile(
            q_ptr, (q_stride_b, q_stride_s, q_stride_h, q_stride_d),
            q_out_ptr, (q_out_stride_b, q_out_stride_s, q_out_stride_h, q_out_stride_d),
            H, head_tile, batch, tokens, is_token,
            cos_ptr + table_offset, sin_ptr + table_offset, is_row,
            HALF, REST, INTERLEAVED, IS_FULL, IS_TRANSPOSED, SHARE_ANGLES, ACC,
            BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_tile(
            k_ptr, (k_stride_b, k_stride_s, k_stride_h, k_stride_d),
            k_out_ptr, (k_out_stride_b, k_out_stride_s, k_out_stride_h, k_out_stride_d),
            HK, head_tile - num_q_tiles, batch, tokens, is_token,
            cos_ptr + table_offset, sin_ptr + table_offset, is_row,
            HALF, REST, INTERLEAVED, IS_FULL, IS_TRANSPOSED, SHARE_ANGLES, ACC,
            BLOCK_HK, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip

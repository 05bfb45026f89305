"""The kernels of the embedding and how they are launched."""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import isqrt
from typing import Literal

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.rows import accumulator, triton_accumulator
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable

# Rows of a tile on a GPU: each row and token takes a pointer in registers, however narrow it is.
MAX_ROWS = 64


@dataclass(frozen=True)
class Config:
    """The launch of one direction; the last two are 1 in the forward.

    Attributes:
        block_rows: rows of the result in a tile.
        block_n: its columns.
        num_warps: of a program.
        block_tokens: tokens that are added at once.
        num_tiles: tiles that a program takes in turn, as far apart as the table is long: frequent
            words stand side by side.
    """

    block_rows: int
    block_n: int
    num_warps: int
    block_tokens: int = 1
    num_tiles: int = 1


def candidates(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, direction: str
) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    sizes = product((2048, 4096, 8192), (4, 8))
    if direction == "forward":
        return {_config(shape, dtype, *size): "" for size in sizes}
    adding = tuple(product((2, 4, 8), (1, 4)))
    return {_config(shape, dtype, *size, *added): "" for size in sizes for added in adding}


def _config(
    shape: tuple[int, int],
    dtype: torch.dtype,
    tile_bytes: int,
    num_warps: int,
    block_tokens: int = 1,
    num_tiles: int = 1,
    max_rows: int = MAX_ROWS,
) -> Config:
    (rows, width), elements = shape, tile_bytes // dtype.itemsize
    block_n = min(triton.next_power_of_2(width), elements)
    block_rows = min(triton.next_power_of_2(rows), elements // block_n, max_rows)
    num_tiles = min(num_tiles, triton.cdiv(rows, block_rows))
    return Config(block_rows, block_n, num_warps, block_tokens, num_tiles)


@tunable("embedding", candidates)
def config(
    shape: tuple[int, int],
    dtype: torch.dtype,
    gpu: Gpu | None,
    direction: Literal["forward", "backward"] = "forward",
) -> Config:
    """Choose the launch for (rows of the result, D), or for the interpreter where `gpu` is None."""
    if gpu is None:  # a program costs the same whatever its tile
        tokens = 8 if direction == "backward" else 1
        return _config(shape, dtype, 1 << 15, 4, tokens, max_rows=1 << 14)
    if direction == "forward":
        return _config(shape, dtype, 8192, 4)
    return _config(shape, dtype, 2048, 4, 4, 4)


def piece_length(tokens: int) -> int:
    """Return the tokens of a piece, such that no row adds many of them, nor many pieces."""
    return 1 << max(5, isqrt(tokens // 2).bit_length() - 1)


@jit
def _embedding_fwd_kernel(
    out_ptr, indices_ptr, weight_ptr, is_right_ptr, T, V, weight_stride_v, weight_stride_n,
    N: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    tokens = pid // NUM_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = pid % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(indices_ptr + tokens, tokens < T, other=0).to(tl.int64)
    is_row = (index >= 0) & (index < V)
    # All who write here write the same.
    tl.store(is_right_ptr + tokens * 0, tokens * 0, (tokens < T) & (is_row == 0))
    weight_at = weight_ptr + index[:, None] * weight_stride_v + n[None, :] * weight_stride_n
    row = tl.load(weight_at, is_row[:, None] & (n < N)[None, :], other=0.0)
    if SCALE != 1.0:
        row = (row.to(ACC) * tl.full((1, 1), SCALE, ACC)).to(weight_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * N + n[None, :], row, (tokens < T)[:, None] & (n < N))


@jit
def _embedding_bwd_pieces_kernel(
    dout_ptr, sorted_ptr, order_ptr, pieces_ptr, dout_stride_t, dout_stride_n,
    N: tl.constexpr, ACC: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum each whole piece of the sorted tokens that holds one index only."""
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    piece = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    n = (tl.program_id(0) % NUM_BLOCKS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = piece * PIECE
    if tl.load(sorted_ptr + begin) == tl.load(sorted_ptr + begin + PIECE - 1):
        total = tl.zeros((BLOCK_TOKENS, BLOCK_N), ACC)
        for start in range(0, PIECE, BLOCK_TOKENS):
            token = tl.load(order_ptr + begin + start + tl.arange(0, BLOCK_TOKENS))
            dout_at = dout_ptr + token[:, None] * dout_stride_t + n[None, :] * dout_stride_n
            total += tl.load(dout_at, (n < N)[None, :], other=0.0).to(ACC)
        tl.store(pieces_ptr + piece * N + n, tl.sum(total, axis=0), n < N)


@jit
def _add_rows(
    total, rows_ptr, order_ptr, begin, end, n, stride_row, stride_n,
    N: tl.constexpr, ACC: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Add the rows at positions [begin, end) of an order (or of themselves) for each result."""
    block = tl.arange(0, BLOCK_TOKENS)
    for start in range(0, tl.max(end - begin, axis=0), BLOCK_TOKENS):
        at = begin[:, None] + start + block[None, :]
        mask = at < end[:, None]
        if order_ptr is not None:
            at = tl.load(order_ptr + at, mask, other=0)
        pointers = rows_ptr + at[:, :, None] * stride_row + n[None, None, :] * stride_n
        total += tl.load(pointers, mask[:, :, None] & (n < N)[None, None, :], other=0.0).to(ACC)
    return total


@jit
def _embedding_bwd_kernel(
    dout_ptr, order_ptr, bounds_ptr, pieces_ptr, dweight_ptr, V, padding_idx,
    dout_stride_t, dout_stride_n,
    N: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
):  # fmt: skip
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    n = pid % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    num_places = tl.num_programs(0).to(tl.int64) // NUM_BLOCKS
    for tile in range(NUM_TILES):
        place = pid // NUM_BLOCKS + tile * num_places
        rows = place * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_summed = (rows < V) & (rows != padding_idx)
        begin = tl.load(bounds_ptr + rows, is_summed, other=0)
        end = tl.load(bounds_ptr + rows + 1, is_summed, other=0)
        first, last = (begin + PIECE - 1) // PIECE, end // PIECE
        has_pieces = first < last
        first, last = tl.where(has_pieces, first, 0), tl.where(has_pieces, last, 0)
        total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS, BLOCK_N), ACC)
        head_end = tl.where(has_pieces, first * PIECE, end)
        total = _add_rows(
            total, dout_ptr, order_ptr, begin, head_end, n, dout_stride_t, dout_stride_n,
            N, ACC, BLOCK_TOKENS,
        )  # fmt: skip
        if pieces_ptr is not None:
            total = _add_rows(total, pieces_ptr, None, first, last, n, N, 1, N, ACC, BLOCK_TOKENS)
            tail_begin = tl.where(has_pieces, last * PIECE, end)
            total = _add_rows(
                total, dout_ptr, order_ptr, tail_begin, end, n, dout_stride_t, dout_stride_n,
                N, ACC, BLOCK_TOKENS,
            )  # fmt: skip
        gradient = tl.sum(total, axis=1) * tl.full((1, 1), SCALE, ACC)
        dweight_at = dweight_ptr + rows[:, None] * N + n[None, :]
        tl.store(dweight_at, gradient, (rows < V)[:, None] & (n < N)[None, :])


def gather(
    out: torch.Tensor,
    indices: torch.Tensor,
    weight: torch.Tensor,
    is_right: torch.Tensor,
    scale: float,
) -> None:
    """Write the rows into `out`, and 0 into `is_right` where an index is none of the table's."""
    (rows, width), tokens = weight.shape, len(indices)
    if out.numel() == 0:
        return
    chosen = config((tokens, width), weight.dtype, launch_gpu(weight.device))
    _embedding_fwd_kernel[
        (triton.cdiv(tokens, chosen.block_rows) * triton.cdiv(width, chosen.block_n),)
    ](
        out,
        indices,
        weight,
        is_right,
        tokens,
        rows,
        *weight.stride(),
        N=width,
        SCALE=scale,
        ACC=triton_accumulator(weight.dtype),
        BLOCK_ROWS=chosen.block_rows,
        BLOCK_N=chosen.block_n,
        num_warps=chosen.num_warps,
    )


def sum_rows(
    dweight: torch.Tensor,
    dout: torch.Tensor,
    keys: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    padding_idx: int,
) -> None:
    """Write the gradient of the table.

    Args:
        dweight: (V, D), contiguous, to be written.
        dout: (T, D), any strides, T and D not 0.
        keys: (T,), the indices sorted.
        order: (T,) int64, the token of each.
        bounds: (V + 1,) int64, where each row's tokens begin in that order.
        scale: of the sums.
        padding_idx: a row without a gradient; −1 for none.
    """
    (rows, width), tokens, acc = dweight.shape, len(keys), triton_accumulator(dout.dtype)
    chosen = config((rows, width), dout.dtype, launch_gpu(dout.device), "backward")
    num_blocks, piece = triton.cdiv(width, chosen.block_n), piece_length(tokens)
    sizes = {"PIECE": piece, "BLOCK_TOKENS": chosen.block_tokens, "BLOCK_N": chosen.block_n}
    sizes |= {"N": width, "num_warps": chosen.num_warps}
    pieces = None
    if num_pieces := tokens // piece:
        pieces = dout.new_empty((num_pieces, width), dtype=accumulator(dout.dtype))
        _embedding_bwd_pieces_kernel[(num_pieces * num_blocks,)](
            dout, keys, order, pieces, *dout.stride(), ACC=acc, **sizes
        )
    num_places = triton.cdiv(rows, chosen.block_rows * chosen.num_tiles)
    _embedding_bwd_kernel[(num_places * num_blocks,)](
        dout,
        order,
        bounds,
        pieces,
        dweight,
        rows,
        padding_idx,
        *dout.stride(),
        SCALE=scale,
        ACC=acc,
        BLOCK_ROWS=chosen.block_rows,
        NUM_TILES=chosen.num_tiles,
        **sizes,
    )

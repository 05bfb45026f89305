"""The kernels of a linear layer with an adapter, each with its launcher.

All three are products with a matrix of few rows, so each is one pass over the large matrix beside
it; dropout multiplies that matrix by its mask on the way and stores nothing.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
from nearlight.core.rows import accumulator, triton_accumulator
from nearlight.core.triton import jit
from nearlight.ops._dropout import kept, threshold_and_scale
from nearlight.ops.lora_linear.tiles import (
    Config,
    across_config,
    down_config,
    padded,
    up_config,
)

# Tensor cores cut off what an addition rounds, and Triton lets them add the tiles' products, too,
# unless each is multiplied by a number that it does not know.
_ONE = 1.0


class Dropout(NamedTuple):
    """Which mask: a seed and an offset, int64 (2,), and the share that is dropped."""

    seed: torch.Tensor
    p: float


@jit
def _times(left, right, DOT: tl.constexpr, ACC: tl.constexpr):
    """Multiply two tiles in the dtype DOT; fp32 with all its digits, by three products of tf32."""
    PRECISION: tl.constexpr = "tf32x3" if DOT == tl.float32 else "ieee"
    return tl.dot(left.to(DOT), right.to(DOT), input_precision=PRECISION, out_dtype=ACC)


@jit
def _mask_of(
    seed, offset, m, begin, N, FOURS: tl.constexpr, THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return which elements of a tile that begins in a column are kept, numbered row by row."""
    if FOURS:
        number = m[:, None] * (N // 4) + (begin // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    else:
        number = m[:, None] * N + (begin + tl.arange(0, BLOCK_N))[None, :]
    return kept(seed, offset, number, FOURS, THRESHOLD, BLOCK_M, BLOCK_N)


@jit
def _load(ptr, m, n, M, N, stride_m, stride_n):
    """Load a tile of a matrix, 0 outside."""
    at = ptr + m[:, None] * stride_m + n[None, :] * stride_n
    return tl.load(at, (m < M)[:, None] & (n < N)[None, :], other=0.0)


@jit
def _lora_down_kernel(
    out_ptr, x_ptr, factor_ptr, seed_ptr, M, N, R, piece, one,
    x_stride_m, x_stride_n, factor_stride_r, factor_stride_n,
    SCALE: tl.constexpr, FOURS: tl.constexpr, THRESHOLD: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write SCALE · Σ_n x[m, n] factor[r, n] over one piece of the columns."""
    num_blocks = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    m = (pid % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    which = (pid // num_blocks).to(tl.int64)
    begin = which * piece
    total = tl.zeros((BLOCK_M, BLOCK_R), ACC)
    if seed_ptr is not None:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    for start in range(begin, tl.minimum(begin + piece, N), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = _load(x_ptr, m, n, M, N, x_stride_m, x_stride_n)
        if seed_ptr is not None:  # a product, so that a NaN stays one
            keep = _mask_of(seed, offset, m, start, N, FOURS, THRESHOLD, BLOCK_M, BLOCK_N)
            x *= keep.to(x.dtype)
        factor = _load(factor_ptr, n, r, N, R, factor_stride_n, factor_stride_r)
        total += _times(x, factor, DOT, ACC) * one
    at = out_ptr + which * M * R + m[:, None] * R + r[None, :]
    mask = (m < M)[:, None] & (r < R)[None, :]
    tl.store(at, (total * SCALE).to(out_ptr.dtype.element_ty), mask)


@jit
def _lora_up_kernel(
    out_ptr, low_ptr, factor_ptr, bias_ptr, seed_ptr, M, N, R, factor_stride_r, factor_stride_n,
    SCALE: tl.constexpr, FOURS: tl.constexpr, THRESHOLD: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write SCALE · Σ_r low[m, r] factor[r, n] where the mask keeps it, plus bias[n]."""
    num_blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    m = (pid // num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = (pid % num_blocks).to(tl.int64) * BLOCK_N
    n = begin + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    low = _load(low_ptr, m, r, M, R, R, 1)
    factor = _load(factor_ptr, r, n, R, N, factor_stride_r, factor_stride_n)
    out = _times(low, factor, DOT, ACC) * SCALE
    if seed_ptr is not None:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
        out *= _mask_of(seed, offset, m, begin, N, FOURS, THRESHOLD, BLOCK_M, BLOCK_N).to(ACC)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, other=0.0).to(ACC)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask)


@jit
def _lora_across_kernel(
    out_ptr, dx_ptr, x_ptr, low_ptr, factor_ptr, seed_ptr, M, N, R, piece, one,
    out_stride_r, out_stride_n, x_stride_m, x_stride_n, factor_stride_r, factor_stride_n,
    SCALE: tl.constexpr, FOURS: tl.constexpr, THRESHOLD: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write SCALE · Σ_m low[m, r] x[m, n] over one piece of the rows, and what `up` would."""
    num_blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    begin = (pid % num_blocks).to(tl.int64) * BLOCK_N
    n = begin + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    which = (pid // num_blocks).to(tl.int64)
    first = which * piece
    total = tl.zeros((BLOCK_R, BLOCK_N), ACC)
    if seed_ptr is not None:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    if dx_ptr is not None:
        factor = _load(factor_ptr, r, n, R, N, factor_stride_r, factor_stride_n)
    for start in range(first, tl.minimum(first + piece, M), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        low = _load(low_ptr, m, r, M, R, R, 1)
        x = _load(x_ptr, m, n, M, N, x_stride_m, x_stride_n)
        if seed_ptr is not None:
            keep = _mask_of(seed, offset, m, begin, N, FOURS, THRESHOLD, BLOCK_M, BLOCK_N)
            x *= keep.to(x.dtype)
        total += _times(tl.trans(low), x, DOT, ACC) * one
        if dx_ptr is not None:
            dx = _times(low, factor, DOT, ACC) * SCALE
            if seed_ptr is not None:
                dx *= keep.to(ACC)
            mask = (m < M)[:, None] & (n < N)[None, :]
            dx_at = dx_ptr + m[:, None] * N + n[None, :]
            tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask)
    at = out_ptr + which * R * N + r[:, None] * out_stride_r + n[None, :] * out_stride_n
    tl.store(at, total * SCALE, (r < R)[:, None] & (n < N)[None, :])


_DOT_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _dot_dtype(left: torch.Tensor, right: torch.Tensor) -> torch.dtype:
    return torch.promote_types(left.dtype, right.dtype)


def _constants(
    config: Config, rank: int, width: int, dot: torch.dtype, dropout: Dropout | None, scale: float
) -> dict[str, Any]:
    """Return the compile-time constants of a launch: those of a training run, and its tile."""
    threshold, factor = (0, 1.0) if dropout is None else threshold_and_scale(dropout.p)
    return {
        # As an argument it would be rounded to fp32.
        "SCALE": scale * factor,
        "FOURS": width % 4 == 0,
        "THRESHOLD": threshold,
        "DOT": _DOT_TYPES[dot],
        "ACC": triton_accumulator(dot),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": padded(rank),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _seed(dropout: Dropout | None) -> torch.Tensor | None:
    return None if dropout is None else dropout.seed.contiguous()


def down(
    x: torch.Tensor,
    factor: torch.Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Return scale · dropout(x) · factorᵀ, (M, R) in `dtype`; reads x once.

    Args:
        x: (M, N), any strides; M ≥ 1.
        factor: (R, N), any strides.
        dtype: of the result.
        scale: a factor.
        dropout: the mask, over x in logical order.
    """
    (rows, width), rank = x.shape, factor.shape[0]
    dot = _dot_dtype(x, factor)
    chosen = down_config((rows, width, rank), dot.itemsize, launch_gpu(x.device))
    pieces = chosen.num_pieces
    out = x.new_empty(pieces, rows, rank, dtype=accumulator(dot) if pieces > 1 else dtype)
    _lora_down_kernel[(triton.cdiv(rows, chosen.block_m) * pieces,)](
        out,
        x,
        factor,
        _seed(dropout),
        rows,
        width,
        rank,
        triton.cdiv(triton.cdiv(width, chosen.block_n), pieces) * chosen.block_n,
        _ONE,
        *x.stride(),
        *factor.stride(),
        **_constants(chosen, rank, width, dot, dropout, scale),
    )
    return _sum(out, dtype)


def up(
    out: torch.Tensor,
    low: torch.Tensor,
    factor: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> None:
    """Write dropout(scale · low · factor) + bias; reads next to nothing.

    Args:
        out: (M, N), contiguous; M ≥ 1.
        low: (M, R), contiguous.
        factor: (R, N), any strides.
        scale: a factor.
        bias: (N,), contiguous.
        dropout: the mask, over out in logical order.
    """
    (rows, width), rank = out.shape, low.shape[1]
    dot = _dot_dtype(low, factor)
    chosen = up_config((rows, width, rank), dot.itemsize, launch_gpu(out.device))
    grid = triton.cdiv(rows, chosen.block_m) * triton.cdiv(width, chosen.block_n)
    _lora_up_kernel[(grid,)](
        out,
        low,
        factor,
        bias,
        _seed(dropout),
        rows,
        width,
        rank,
        *factor.stride(),
        **_constants(chosen, rank, width, dot, dropout, scale),
    )


def across(
    x: torch.Tensor,
    low: torch.Tensor,
    scale: float = 1.0,
    dropout: Dropout | None = None,
    dx: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Return scale · lowᵀ · dropout(x), (R, N) in the dtype of `low`; reads x once.

    Args:
        x: (M, N), any strides; M ≥ 1.
        low: (M, R), contiguous.
        scale: a factor.
        dropout: the mask, over x in logical order.
        dx: (M, N), contiguous; where given, receives what `up(dx, low, factor, scale, None,
            dropout)` writes, by the mask that is drawn already.
        factor: (R, N), any strides, with `dx`.
        is_transposed: return (N, R).
    """
    (rows, width), rank = x.shape, low.shape[1]
    dot = _dot_dtype(x, low)
    shape, gpu = (rows, width, rank), launch_gpu(x.device)
    chosen = across_config(shape, dot.itemsize, gpu, is_writing=dx is not None)
    pieces = chosen.num_pieces
    sizes = (width, rank) if is_transposed else (rank, width)
    out = x.new_empty(pieces, *sizes, dtype=accumulator(dot))
    stride_r, stride_n = (1, rank) if is_transposed else (width, 1)
    _lora_across_kernel[(triton.cdiv(width, chosen.block_n) * pieces,)](
        out,
        dx,
        x,
        low,
        factor,
        _seed(dropout),
        rows,
        width,
        rank,
        triton.cdiv(triton.cdiv(rows, chosen.block_m), pieces) * chosen.block_m,
        _ONE,
        stride_r,
        stride_n,
        *x.stride(),
        *((0, 0) if factor is None else factor.stride()),
        **_constants(chosen, rank, width, dot, dropout, scale),
    )
    return _sum(out, low.dtype)


def _sum(pieces: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add the programs' pieces in a fixed order, and round once."""
    whole = pieces[0] if len(pieces) == 1 else pieces.sum(0)
    return whole.to(dtype)

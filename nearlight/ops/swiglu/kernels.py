"""The kernels of SwiGLU and how they are launched."""

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
    """A program's tile and its warps."""

    block_m: int
    block_n: int
    num_warps: int


def _config(shape: tuple[int, int], elements: int, num_warps: int) -> Config:
    rows, columns = shape
    block_n = min(triton.next_power_of_2(columns), elements)
    block_m = min(triton.next_power_of_2(rows), elements // block_n)
    return Config(block_m, block_n, num_warps)


def candidates(shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    # One, two, four or eight vectors of 16 bytes per thread and tensor.
    found = (
        _config(shape, 32 * num_warps * vectors * 16 // dtype.itemsize, num_warps)
        for num_warps in (2, 4, 8, 16)
        for vectors in (1, 2, 4, 8)
    )
    return dict.fromkeys(found, "")


@tunable("swiglu", candidates)
def config(shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None) -> Config:
    """Choose the launch for (rows, columns) on a GPU, or for the interpreter where it is None.

    The shape is what remains after merging dimensions: contiguous tensors are one long row.
    """
    if gpu is None:  # each program costs the same, whatever its tile
        return _config(shape, 1 << 18, 4)
    return _config(shape, 128 * 2 * 16 // dtype.itemsize, 4)  # two vectors per thread and tensor


@jit
def _sigmoid(x, PRECISE: tl.constexpr):
    """Return 1 / (1 + exp(−x)), with exp to the last bit or two of fp32 where PRECISE."""
    if PRECISE:
        # The GPU's exp multiplies by log2(e) first, which costs |x| units in the last place. So
        # take 2^n out (Cody and Waite): ln 2 is split such that n times its head is exact.
        y = tl.minimum(tl.maximum(-x, -104.0), 89.5)
        n = tl.floor(y * 1.4426950408889634 + 0.5)
        f = (y - n * 0.693359375) + n * 2.12194440e-4
        return 1.0 / (1.0 + tl.exp2(n) * tl.exp(f))
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _tile(
    M, N, INNER, SPLIT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return outer row, inner row and column indices of this program's tile, and its mask."""
    num_column_tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    rows = (pid // num_column_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (pid % num_column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (columns < N)
    if SPLIT_ROWS:
        return rows // INNER, rows % INNER, columns, mask
    return rows * 0, rows, columns, mask


@jit
def _swiglu_fwd_kernel(
    out_ptr, gate_ptr, up_ptr, M, N, INNER,
    out_stride_o, out_stride_m, out_stride_n,
    gate_stride_o, gate_stride_m, gate_stride_n,
    up_stride_o, up_stride_m, up_stride_n,
    ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = _tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    gate_at = gate_ptr + o * gate_stride_o + m * gate_stride_m + n * gate_stride_n
    up_at = up_ptr + o * up_stride_o + m * up_stride_m + n * up_stride_n
    gate = tl.load(gate_at, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_at, mask=mask, other=0.0).to(ACC)
    out = gate * _sigmoid(gate, PRECISE) * up
    out_at = out_ptr + o * out_stride_o + m * out_stride_m + n * out_stride_n
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _swiglu_bwd_kernel(
    dgate_ptr, dup_ptr, dout_ptr, gate_ptr, up_ptr, M, N, INNER,
    dgate_stride_o, dgate_stride_m, dgate_stride_n,
    dup_stride_o, dup_stride_m, dup_stride_n,
    dout_stride_o, dout_stride_m, dout_stride_n,
    gate_stride_o, gate_stride_m, gate_stride_n,
    up_stride_o, up_stride_m, up_stride_n,
    ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = _tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    dout_at = dout_ptr + o * dout_stride_o + m * dout_stride_m + n * dout_stride_n
    gate_at = gate_ptr + o * gate_stride_o + m * gate_stride_m + n * gate_stride_n
    up_at = up_ptr + o * up_stride_o + m * up_stride_m + n * up_stride_n
    dout = tl.load(dout_at, mask=mask, other=0.0).to(ACC)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_at, mask=mask, other=0.0).to(ACC)
    sigmoid = _sigmoid(gate, PRECISE)
    dgate = dout * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    dup = dout * (gate * sigmoid)
    dgate_at = dgate_ptr + o * dgate_stride_o + m * dgate_stride_m + n * dgate_stride_n
    dup_at = dup_ptr + o * dup_stride_o + m * dup_stride_m + n * dup_stride_n
    tl.store(dgate_at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_at, dup.to(dup_ptr.dtype.element_ty), mask=mask)

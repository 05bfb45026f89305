"""Element-wise kernels over tensors of any strides: how they are tiled, launched and tuned.

Dimensions that all tensors walk alike are merged first: contiguous tensors are one long row. A
kernel takes what remains as rows and columns, its rows perhaps in an outer and an inner dimension.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.rows import triton_accumulator
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable


@dataclass(frozen=True)
class Config:
    """A program's tile and its warps."""

    block_m: int
    block_n: int
    num_warps: int


Rule = Callable[[tuple[int, int], torch.dtype, Gpu | None], Config]


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


def config(shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None) -> Config:
    """Choose the launch for (rows, columns) on a GPU, or for the interpreter where it is None.

    The shape is what remains after merging dimensions: contiguous tensors are one long row.
    """
    if gpu is None:  # each program costs the same, whatever its tile
        return _config(shape, 1 << 18, 4)
    return _config(shape, 128 * 2 * 16 // dtype.itemsize, 4)  # two vectors per thread and tensor


def tunable_config(op: str) -> Rule:
    """Return `config` as the launch rule of one op, with the tuned rows of that op before it."""
    return tunable(op, candidates)(config)


@jit
def tile(
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


def merge_dims(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Merge the dimensions that all tensors can walk as one.

    Args:
        shape: the common shape.
        strides: strides of each tensor; the first one's order of memory is followed.

    Returns:
        Dimensions from the outermost to the innermost, each (size, stride of each tensor).
    """
    merged: list[tuple[int, ...]] = []
    for dim in sorted(range(len(shape)), key=lambda dim: strides[0][dim], reverse=True):
        size, steps = shape[dim], tuple(stride[dim] for stride in strides)
        if size == 1:
            continue
        if merged and all(
            outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)
        ):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def launch(
    rule: Rule,
    kernel: Any,
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    **constants: Any,
) -> None:
    """Run an element-wise kernel over tensors of one shape, whatever their strides.

    Args:
        rule: chooses the tile.
        kernel: takes the tensors; M, N and INNER; three strides of each tensor (outer rows, inner
            rows, columns); then ACC, PRECISE (fp32 results are wanted to the last bits),
            SPLIT_ROWS, BLOCK_M and BLOCK_N for `tile`.
        written: outputs, all in one order of memory.
        read: inputs; copied in that order only where more than three dimensions remain.
        constants: further compile-time constants of the kernel.
    """
    tensors = (*written, *read)
    first = written[0]
    if first.numel() == 0:
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        dims: list[tuple[int, ...]] = [(first.numel(), *[1] * len(tensors))]
    else:
        dims = merge_dims(first.shape, *(tensor.stride() for tensor in tensors))
    if len(dims) > 3:
        # All written tensors lie in one order of memory; copies in that order merge with them.
        copies = [torch.empty_like(first).copy_(tensor) for tensor in read]
        return launch(rule, kernel, written, copies, **constants)
    still = (1, *[0] * len(tensors))
    outer, inner, columns = (*[still] * (3 - len(dims)), *dims)
    rows = outer[0] * inner[0]
    chosen = rule((rows, columns[0]), first.dtype, launch_gpu(first.device))
    kernel[(triton.cdiv(rows, chosen.block_m) * triton.cdiv(columns[0], chosen.block_n),)](
        *tensors,
        rows,
        columns[0],
        inner[0],
        *[step for steps in zip(outer[1:], inner[1:], columns[1:], strict=True) for step in steps],
        ACC=triton_accumulator(first.dtype),
        PRECISE=first.dtype == torch.float32,
        SPLIT_ROWS=outer[0] > 1,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        num_warps=chosen.num_warps,
        **constants,
    )

"""How kernels that walk over rows are launched: rules for a GPU, and what `tune` may try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import Literal

import torch
import triton

from nearlight.core.hardware import Gpu
from nearlight.core.tuned import tunable

# A row up to here is held in registers (with one sum beside it); a wider one is read twice.
MAX_BLOCK = 16384
# Up to here the parameters of a row stay in registers while a program walks over its rows.
MAX_HELD_BLOCK = 8192
# Elements of a tile of several short rows; more, and too few programs share an SM.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048
# Warps per SM of a backward's persistent programs; their sums take the registers of more.
HELD_WARPS, WIDE_WARPS = 16, 32


@dataclass(frozen=True)
class RowConfig:
    """How a row-wise kernel is launched.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile, a power of two; fewer than the row has where it is too wide.
        num_warps: warps of a program.
        num_stages: depth of the loads' pipeline; 1 for none.
        num_programs: programs over the rows; a grid has this many per block of columns.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int

    @property
    def holds_parameters(self) -> bool:
        """Whether a row's parameters stay in registers while a program walks over its rows."""
        return self.block_n <= MAX_HELD_BLOCK


def forward_config(
    shape: tuple[int, int],
    gpu: Gpu | None,
    elements_per_thread: int = 32,
    wide_block: int = MAX_BLOCK // 2,
) -> RowConfig:
    """Choose the launch of a pass that reads (rows, N) and writes as much.

    One program per tile.

    Args:
        shape: rows and their width.
        gpu: None for the interpreter, where a program costs the same whatever its tile.
        elements_per_thread: by default four 16-byte loads of bf16 in flight before the first use;
            with more, fewer warps wait at the barriers of sums that follow one another.
        wide_block: columns of a tile where a row is too wide for one.
    """
    rows, width = shape
    if width > MAX_BLOCK:
        # Few large programs: of the rows in flight more stays in L2 for the second read.
        return RowConfig(1, wide_block if gpu else MAX_BLOCK, 32 if gpu else 4, 1, rows)
    block_n = triton.next_power_of_2(width)
    block_m = _block_m(rows, block_n, gpu, FORWARD_TILE)
    num_warps = min(32, max(1, block_m * block_n // (32 * elements_per_thread)))
    return RowConfig(block_m, block_n, num_warps, 1, triton.cdiv(rows, block_m))


def backward_config(
    shape: tuple[int, int],
    dtype: torch.dtype,
    gpu: Gpu | None,
    num_sums: int = 1,
    num_upstream: int = 1,
) -> RowConfig:
    """Choose the launch of a pass over (rows, N) that sums over the rows on its way.

    Persistent programs: each walks over every `num_programs`-th tile with its sums in registers.

    Args:
        shape: rows and their width.
        dtype: dtype of the rows.
        gpu: None for the interpreter.
        num_sums: how many sums over the rows a program holds.
        num_upstream: how many upstream gradients it reads beside the rows.
    """
    rows, width = shape
    # Registers hold less of a row the more stands beside it, and of fp32 rows less again.
    pressure = max(num_sums, num_upstream)
    if min(num_sums, num_upstream) > 1 and dtype.itemsize >= 4:
        pressure *= 2
    widest = MAX_BLOCK // pressure
    is_wide = width > widest
    block_n = 2048 if is_wide else triton.next_power_of_2(width)
    if gpu is None:
        block_n = widest if is_wide else block_n
        # NumPy adds the rows of a tile one after the other: more of them lose digits of the sum.
        block_m = min(64, 2**18 // block_n, triton.next_power_of_2(rows))
        tiles = triton.cdiv(rows, block_m)
        return RowConfig(block_m, block_n, 4, 1, min(tiles, max(2, isqrt(32 * tiles))))
    block_m = 1 if is_wide else _block_m(rows, block_n, gpu, BACKWARD_TILE)
    per_thread = 16 if num_upstream == 1 or width <= MAX_HELD_BLOCK // pressure else 8
    num_warps = min(32, max(1, block_m * block_n // (32 * per_thread)))
    num_stages = 1
    if block_n <= MAX_HELD_BLOCK:  # beyond, the pipeline would carry the parameters, too
        stage_bytes = _stage_bytes(block_m, block_n, dtype, num_upstream)
        deepest = 1 if is_wide and pressure > 2 else 2  # a stage's addresses take registers, too
        num_stages += min(deepest, (gpu.shared_bytes_per_block - 4096) // stage_bytes)
    warps_per_sm = WIDE_WARPS if is_wide else HELD_WARPS
    tile = RowConfig(block_m, block_n, num_warps, num_stages, 0)
    return _with_programs(tile, shape, dtype, gpu, warps_per_sm)


def _with_programs(
    tile: RowConfig, shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu, warps_per_sm: int
) -> RowConfig:
    """Return a backward's tile with so many programs that each SM gets its warps."""
    tiles = triton.cdiv(shape[0], tile.block_m)
    programs = max(1, warps_per_sm // tile.num_warps) * gpu.num_sms
    programs //= triton.cdiv(shape[1], tile.block_n)
    if dtype.itemsize >= 4:
        # A sum of n numbers one by one errs as √n: a program's tiles and the programs, of which
        # `column_sums` takes 32 at once, share the number fairly.
        programs = max(programs, isqrt(32 * tiles))
    return replace(tile, num_programs=min(tiles, max(1, programs)))


def _stage_bytes(block_m: int, block_n: int, dtype: torch.dtype, num_upstream: int) -> int:
    """Return a stage's shared memory: rows, upstream gradients (fp32 at most), and parameters.

    Parameters only where they are not held.
    """
    rows_bytes = block_m * block_n * (dtype.itemsize + num_upstream * max(dtype.itemsize, 4))
    return rows_bytes + (0 if block_n <= MAX_HELD_BLOCK else block_n * 4)


def forward_candidates(shape: tuple[int, int], gpu: Gpu | None) -> dict[RowConfig, str]:
    """Return the launches worth a try beside `forward_config`'s; arguments as there."""
    rows, width = shape
    if gpu is None:
        return {}
    if width > MAX_BLOCK:
        wide = product((4096, 8192, MAX_BLOCK), (8, 16, 32), (1, 2, 3))
        return dict.fromkeys((RowConfig(1, *each, rows) for each in wide), "")
    found, block_n = {}, triton.next_power_of_2(width)
    tiles = (1024, 2048, 4096, 8192, 16384)
    for tile_elements, per_thread in product(tiles, (8, 16, 32, 64)):
        block_m = max(1, tile_elements // block_n)
        num_warps = block_m * block_n // (32 * per_thread)
        if 1 <= num_warps <= 32:
            programs = triton.cdiv(rows, block_m)
            found[RowConfig(block_m, block_n, num_warps, 1, programs)] = ""
    return found


def backward_candidates(
    shape: tuple[int, int],
    dtype: torch.dtype,
    gpu: Gpu | None,
    num_sums: int = 1,
    num_upstream: int = 1,
) -> dict[RowConfig, str]:
    """Return the launches worth a try beside `backward_config`'s; arguments as there."""
    if gpu is None:
        return {}
    found: dict[RowConfig, str] = {}
    rule = backward_config(shape, dtype, gpu, num_sums, num_upstream)
    if rule.block_n < shape[1]:
        tiles = [(1, block_n) for block_n in (1024, 2048, 4096)]
    else:
        sizes = (rule.block_m // 2, rule.block_m, 2 * rule.block_m)
        tiles = [(block_m, rule.block_n) for block_m in sizes if block_m]
    for (block_m, block_n), per_thread, stages, warps_per_sm in product(
        tiles, (8, 16, 32), (1, 2, 3), (16, 32)
    ):
        num_warps = block_m * block_n // (32 * per_thread)
        if 1 <= num_warps <= 32:
            tile = RowConfig(block_m, block_n, num_warps, stages, 0)
            needed = 4096 + (stages - 1) * _stage_bytes(block_m, block_n, dtype, num_upstream)
            allowed = gpu.shared_bytes_per_block
            reason = f"{needed} bytes of shared memory, a block has {allowed}"
            found.setdefault(
                _with_programs(tile, shape, dtype, gpu, warps_per_sm),
                reason if needed > allowed else "",
            )
    return found


def tunable_config(
    op: str, num_sums: int = 1, num_upstream: int = 1, elements_per_thread: int = 32
) -> Callable[..., RowConfig]:
    """Return the launch rule of a row-wise op, with its tuned rows before it.

    Args:
        op: its name.
        num_sums: how many sums over the rows its backward holds.
        num_upstream: how many upstream gradients that reads; the forward reads as many tensors.
        elements_per_thread: of the forward, in rows that leave registers for so many.
    """

    def candidates(
        shape: tuple[int, int],
        dtype: torch.dtype,
        gpu: Gpu | None,
        direction: Literal["forward", "backward"],
    ) -> dict[RowConfig, str]:
        if direction == "forward":
            return forward_candidates(shape, gpu)
        return backward_candidates(shape, dtype, gpu, num_sums, num_upstream)

    @tunable(op, candidates)
    def config(
        shape: tuple[int, int],
        dtype: torch.dtype,
        gpu: Gpu | None,
        direction: Literal["forward", "backward"] = "forward",
    ) -> RowConfig:
        """Choose the launch for (rows, N) on a GPU, or for the interpreter where `gpu` is None."""
        if direction == "backward":
            return backward_config(shape, dtype, gpu, num_sums, num_upstream)
        elements = elements_per_thread if shape[1] <= MAX_BLOCK // 2 else 32
        # Of two wide rows registers hold half as much of each.
        return forward_config(shape, gpu, elements, MAX_BLOCK // 2 // num_upstream)

    return config


def _block_m(rows: int, block_n: int, gpu: Gpu | None, tile_elements: int) -> int:
    if gpu is None:
        return min(2**18 // block_n, triton.next_power_of_2(rows))
    block_m = max(1, tile_elements // block_n)
    # Too few rows to give every SM a full tile: one row per program.
    return block_m if rows >= block_m * gpu.num_sms else 1

"""How the kernels of a linear layer with an adapter are tiled and launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import triton

from nearlight.core.hardware import Gpu
from nearlight.core.tuned import tunable

MAX_RANK = 128
_INTERPRETED_ELEMENTS = 2**17

Shape = tuple[int, int, int]  # rows and columns of the large matrix, rank
Summed = Literal["", "rows", "columns"]


@dataclass(frozen=True)
class Config:
    """A tile (rows, columns), how many programs share a sum, and the launch."""

    block_m: int
    block_n: int
    num_pieces: int
    num_warps: int
    num_stages: int


def padded(rank: int) -> int:
    """Return the rank as tiles have it: a power of two that tensor cores take."""
    return max(16, triton.next_power_of_2(rank))


def _config(
    shape: Shape,
    itemsize: int,
    gpu: Gpu,
    summed: Summed,
    tile: tuple[int, int],
    num_warps: int = 4,
    programs_per_sm: int = 2,
    num_stages: int = 3,
) -> Config:
    """Return a launch whose sums, along rows or columns, are shared by as many programs."""
    rows, columns, rank = shape
    wide = padded(rank)
    # What a thread holds grows with the rank, and with fp32 in three parts.
    narrowing = max(1, wide // 32) * max(1, itemsize // 2)
    block_m, block_n = tile[0], max(32, tile[1] // narrowing)
    tiles = {"rows": triton.cdiv(rows, block_m), "columns": triton.cdiv(columns, block_n)}
    num_pieces = 1
    if summed:
        along = tiles.pop(summed)
        (others,) = tiles.values()
        num_pieces = max(1, min(along, programs_per_sm * gpu.num_sms // others))
        num_pieces = triton.cdiv(along, triton.cdiv(along, num_pieces))  # none without a tile
    if wide * itemsize >= 128:
        num_warps = max(num_warps, 8)
    stage_bytes = (block_m * block_n + max(block_m, block_n) * wide) * itemsize
    stages = max(1, min(num_stages, gpu.shared_bytes_per_block // 2 // stage_bytes))
    return Config(block_m, block_n, num_pieces, num_warps, stages)


def _interpreted(shape: Shape) -> Config:
    """Return few large tiles: a program costs the same whatever its tile."""
    block_m = min(padded(shape[0]), 256)
    return Config(block_m, min(padded(shape[1]), _INTERPRETED_ELEMENTS // block_m), 1, 4, 1)


def _candidates_of(summed: Summed) -> Callable[..., dict[Config, str]]:
    tiles = (32, 64), (64, 32), (64, 64), (64, 128), (128, 64)
    shared, stages = ((1, 2, 4, 8), (2, 3, 4)) if summed else ((1,), (1,))

    def candidates(
        shape: Shape, itemsize: int, gpu: Gpu | None, is_writing: bool = False
    ) -> dict[Config, str]:
        if gpu is None:
            return {}
        return dict.fromkeys(
            (
                _config(shape, itemsize, gpu, summed, *each)
                for each in product(tiles, (4, 8), shared, stages)
            ),
            "",
        )

    return candidates


@tunable("lora_linear", _candidates_of("columns"))
def down_config(shape: Shape, itemsize: int, gpu: Gpu | None) -> Config:
    """Choose the launch of `down`.

    Args:
        shape: rows and columns of what it reads, rank.
        itemsize: bytes of an element as it is multiplied.
        gpu: None for the interpreter.
    """
    if gpu is None:
        return _interpreted(shape)
    return _config(shape, itemsize, gpu, "columns", (64, 128))


@tunable("lora_linear", _candidates_of(""))
def up_config(shape: Shape, itemsize: int, gpu: Gpu | None) -> Config:
    """Choose the launch of `up`; see `down_config`."""
    if gpu is None:
        return _interpreted(shape)
    return _config(shape, itemsize, gpu, "", (64, 128), num_warps=8, num_stages=1)


@tunable("lora_linear", _candidates_of("rows"))
def across_config(shape: Shape, itemsize: int, gpu: Gpu | None, is_writing: bool) -> Config:
    """Choose the launch of `across`, where `is_writing` with dx; see `down_config`."""
    if gpu is None:
        return _interpreted(shape)
    block_m = 64 if itemsize == 2 else 32
    if is_writing:  # with two products and a mask a wider tile spills
        num_warps = 4 if itemsize == 2 else 8
        return _config(shape, itemsize, gpu, "rows", (block_m, 32), num_warps, programs_per_sm=4)
    return _config(shape, itemsize, gpu, "rows", (block_m, 128))

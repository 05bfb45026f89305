"""How softmax and log_softmax are launched: the rule for a GPU, and what `tune` may try."""

from __future__ import annotations

from itertools import product
from typing import Literal

import torch

from nearlight.core.hardware import Gpu
from nearlight.core.row_config import MAX_BLOCK, RowConfig, forward_candidates, forward_config

Direction = Literal["forward", "backward"]
# Elements of a thread of a row held, with one or two tensors read.
HELD_ELEMENTS = {"forward": 32, "backward": 16}
# What a program reads twice, up to which it has 8 warps; beyond, 16 or 32. About half of what all
# those in flight read waits in L2 for the second time, and should fit.
BYTES_OF_8_WARPS = 2**17


def candidates(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, direction: Direction
) -> dict[RowConfig, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    rows, width = shape
    if gpu is None or width <= MAX_BLOCK:
        return forward_candidates(shape, gpu)
    sizes = product((4, 8, 16, 32), (8, 16, 32, 64), (1, 2, 3))
    return {
        RowConfig(1, 32 * num_warps * elements, num_warps, stages, rows): ""
        for num_warps, elements, stages in sizes
    }


def config(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, direction: Direction
) -> RowConfig:
    """Choose the launch for (rows, N), or for the interpreter where `gpu` is None."""
    rows, width = shape
    if gpu is None or width <= MAX_BLOCK:
        return forward_config(shape, gpu, HELD_ELEMENTS[direction])
    read_bytes = width * dtype.itemsize * (1 + (direction == "backward"))
    num_warps = 8 if read_bytes <= BYTES_OF_8_WARPS else 16
    if read_bytes > 2 * BYTES_OF_8_WARPS:  # one program per SM
        num_warps = 32
    vectors = 4 if num_warps < 32 else 2  # of 16 bytes per thread, of all that is read
    if direction == "backward":
        vectors //= 2
    return RowConfig(1, 32 * num_warps * vectors * 16 // dtype.itemsize, num_warps, 1, rows)

"""Property 3: shapes: one, odd, prime, and one less and one more than each tile edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from nearlight.core import backend
from nearlight.core.errors import one_line
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import described_launches, launched_as_on, misfit
from nearlight.core.op import Case, Op
from nearlight.workbench.flat import refused_layouts
from nearlight.workbench.properties import values
from nearlight.workbench.property import (
    MAX_DERIVED_SIZE,
    Property,
    base_cases,
    is_wide,
    provable,
    remark,
    resized,
    tile_edges,
)
from nearlight.workbench.trial import (
    Refused,
    Trial,
    call,
    make_inputs,
    require_refusal,
    roots_of,
    tensors,
)

# One, even and odd small sizes, and primes on both sides of a warp.
SIZES = (1, 2, 3, 7, 17, 31, 33, 127)
# The interpreter takes few large tiles, because each program costs the same; a GPU takes many.
# Of a GPU with few SMs a small input has more tiles than programs, too.
GPU_TILES = "in the tiles of a GPU"
H200 = find_gpu("h200")
SMALL_GPU = replace(H200, num_sms=2)
GPU_SIZES = (3, 67, 2049)
MAX_GPU_SIZE = 1 << 14
LARGE_TILE = 1 << 12
GRIDS = "grids"


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Dimensions in turn and in pairs at each size; the op's own cases, wide ones included."""
    cases = base_cases(op, quick)
    for case in provable(op):
        if is_wide(case):
            yield Trial(case, seed=1)
    widest = max(provable(op), key=lambda case: max(case.shape.values(), default=1))
    tiles = tile_edges(op, [*cases[:4], widest], device)
    edges = [size for tile in tiles for size in (tile - 1, tile, tile + 1)]
    yield from resized(op, cases[0], (*SIZES, *edges))
    yield from _two_at_once(cases[0], [tile + 1 for tile in tiles])
    # Around large tiles with few rows, which are beyond the size of a trial else.
    few = Trial(cases[0]).resized(**{name: min(size, 3) for name, size in cases[0].shape.items()})
    yield from resized(op, few.case, [edge for edge in edges if edge > LARGE_TILE])
    for case in cases[1:]:
        yield from resized(op, case, (1, 17, *(tile + 1 for tile in tiles if tile <= 128)))
    if device == "cpu":
        yield from _in_gpu_tiles(op, cases)
    yield from [Trial(case, step=GRIDS) for case in (*op.cases, *op.large_cases)]


def _two_at_once(case: Case, sizes: Sequence[int]) -> Iterator[Trial]:
    """Two dimensions beyond a tile together: each size of one with the largest that fits beside."""
    for name, other in combinations(case.shape, 2):
        for size in sizes:
            trials = [Trial(case).resized(**{name: size, other: beside}) for beside in sizes]
            yield from [trial for trial in trials if trial.size <= MAX_DERIVED_SIZE][-1:]


def _in_gpu_tiles(op: Op, cases: Sequence[Case]) -> Iterator[Trial]:
    """Sizes of several tiles of a GPU, whose rows lie together in memory and apart."""
    for case in cases:
        first = next(iter(tensors(make_inputs(op, Trial(case), "cpu"))), "")
        for trial in resized(op, case, GPU_SIZES):
            if trial.size <= MAX_GPU_SIZE:
                yield replace(trial, step=GPU_TILES)
                if first and not refused_layouts(op, first):
                    yield replace(trial, step=GPU_TILES, layouts={first: "strided [::2] dim -1"})


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the results to the rule; a ValueError of the op on a shape it never listed is noted."""
    if trial.step == GRIDS:
        return _grids(op, trial)
    is_listed = any(trial.case == case for case in op.check_cases)
    tiles = launched_as_on(SMALL_GPU) if trial.step == GPU_TILES else nullcontext()
    try:
        with tiles:
            return values.examine(op, trial, device)
    except ValueError as error:
        if is_listed:
            raise
        require_refusal(op, make_inputs(op, trial, device), error)
        raise Refused(f"{dict(trial.case.shape)}: {error}") from error


def _grids(op: Op, trial: Trial) -> str:
    """Hold the grids that a case too large to run here is launched with to what a GPU takes."""
    reason = "nothing is launched on meta tensors"

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return like.requires_grad_(tensor.requires_grad)

    with described_launches(H200) as described, backend.force("triton"), torch.enable_grad():
        try:
            with FakeTensorMode():  # as large as on a GPU, and without memory
                inputs = make_inputs(op, trial, "cpu")
            outputs = call(op.function, tree_map_only(torch.Tensor, on_meta, inputs))
            torch.autograd.backward(*roots_of(outputs, [*map(torch.empty_like, outputs)]))
            reason = "" if described.grids else reason
        except Exception as error:  # what needs values cannot be described
            reason = one_line(error)
    for kernel, grid in described.grids:
        if told := misfit(grid):
            return f"{kernel}: {told}"
    if reason:
        remark(f"the grids of its cases are not known: {reason}")
    return ""


PROPERTY = Property(
    3, "shapes", "sizes of one, odd, prime and around each tile edge are right", trials, examine
)

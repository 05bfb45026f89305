"""Property 3: shapes: one, odd, prime, and one less and one more than each tile edge."""

from __future__ import annotations

from collections.abc import Iterator

from nearlight.core.op import Op
from nearlight.workbench.properties import values
from nearlight.workbench.property import (
    WIDE,
    NotApplicable,
    Property,
    base_cases,
    provable,
    resized,
    tile_edges,
)
from nearlight.workbench.trial import Refused, Trial

# One, even and odd small sizes, and primes on both sides of a warp.
SIZES = (1, 2, 3, 7, 17, 31, 33, 127)


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each dimension in turn at each size; the op's own cases, wide ones included."""
    cases = base_cases(op, quick)
    if not cases:
        raise NotApplicable("no check case below fp64")
    for case in provable(op):
        if max(case.shape.values()) > WIDE:
            yield Trial(case, seed=1)
    widest = max(provable(op), key=lambda case: max(case.shape.values()))
    tiles = tile_edges(op, [*cases[:4], widest], device)
    edges = [size for tile in tiles for size in (tile - 1, tile, tile + 1)]
    yield from resized(op, cases[0], (*SIZES, *edges))
    for case in cases[1:]:
        yield from resized(op, case, (1, 17, *(tile + 1 for tile in tiles if tile <= 128)))


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the results to the rule; a ValueError of the op on a shape it never listed is noted."""
    is_listed = any(trial.case == case for case in op.check_cases)
    try:
        return values.examine(op, trial, device)
    except ValueError as error:
        if is_listed:
            raise
        raise Refused(f"{dict(trial.case.shape)}: {error}") from error


PROPERTY = Property(
    3, "shapes", "sizes of one, odd, prime and around each tile edge are right", trials, examine
)

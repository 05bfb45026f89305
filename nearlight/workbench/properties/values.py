"""Property 1: values and every gradient, for inputs and upstream gradients that are not flat."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nearlight.core.op import Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.property import WIDE, Property, cover, provable
from nearlight.workbench.trial import (
    UPSTREAM,
    VALUES,
    Trial,
    kernels,
    run,
    standard,
)

# (how large, in which layout): a gradient that is 1 everywhere, or contiguous, hides faults.
UPSTREAMS = (
    ("random", "contiguous"),
    ("per row", "contiguous"),
    ("random", "expanded dim 0"),
    ("random", "expanded dim -1"),
    ("random", "expanded all"),
    ("random", "transposed"),
    ("per row", "strided [::2] dim -1"),
)


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Every case as made; then kinds of values and of upstream gradient, in turn."""
    small = cover(provable(op))
    cases = small if quick else [c for c in provable(op) if max(c.shape.values()) <= WIDE]
    kinds = list(VALUES)
    for index, case in enumerate(cases):
        yield Trial(case, seed=index)
        if case == small[0] or (case in small and not quick):
            turns = range(len(UPSTREAMS))
        else:
            # Over all cases each kind has its turn.
            turns = range(index, index + (0 if quick else 4))
        for turn in turns:
            upstream, layout = UPSTREAMS[turn % len(UPSTREAMS)]
            values = kinds[(index + turn) % len(kinds)]
            yield Trial(case, index + turn, values, {UPSTREAM: layout}, upstream)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold outputs and gradients to the tolerance rule."""

    def compute(trial: Trial) -> Compared:
        expected = standard(op, trial, device)
        with kernels(), torch.enable_grad():
            return Compared(run(op.function, expected.inputs, expected.upstream), expected)

    return settle(compute, trial)


PROPERTY = Property(
    1, "values", "outputs and every gradient keep the tolerance rule", trials, examine, True
)

"""What a property of an op is, and which inputs it is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from nearlight.core.op import Case, Op
from nearlight.workbench.fatal import refuse_fatal
from nearlight.workbench.launches import launches
from nearlight.workbench.trial import (
    Trial,
    kernels,
    make_inputs,
    make_upstream,
    run,
)

# More elements than this take the interpreter too long, and prove nothing more.
MAX_DERIVED_SIZE = 1 << 16
# Dimensions beyond this break kernels of their own kind; shapes looks after them.
WIDE = 1 << 16

# What was done, and on which archs, said inside a block of `remarked`.
Remarks = dict[str, list[str]]
_remarks: ContextVar[Remarks | None] = ContextVar("remarks", default=None)


@dataclass(frozen=True)
class Property:
    """One thing an op must have.

    Attributes:
        number: its place in the list of the proof.
        name: one word.
        statement: what holds when it is passed.
        trials: `(op, quick, device) -> trials`; raises `NotApplicable` with the reason.
        examine: `(op, trial, device) -> ""`, or how the property is broken; raises `Rejected`
            where the op has no such input, and lets the op's own exceptions through.
        in_quick: whether `check --quick` proves it.
    """

    number: int
    name: str
    statement: str
    trials: Callable[[Op, bool, str], Iterable[Trial]]
    examine: Callable[[Op, Trial, str], str]
    in_quick: bool = False


class NotApplicable(Exception):  # not an error: one of the three answers
    """The property says nothing about this op, for the reason given."""


class NeedsGpu(NotApplicable):
    """The property says nothing about this op without a GPU."""


@contextmanager
def remarked(said: Remarks) -> Iterator[None]:
    """Add what properties say of their trials inside the block, for the rows of a report."""
    token = _remarks.set(said)
    try:
        yield
    finally:
        _remarks.reset(token)


def remark(text: str, on: str = "") -> None:
    """Say what a trial did or found, and on which arch; a passed property's row has it once."""
    if (said := _remarks.get()) is not None:
        archs = said.setdefault(text, [])
        if on and on not in archs:
            archs.append(on)


def remark_texts(said: Remarks) -> list[str]:
    """Return remarks as they stand in a row."""
    return [f"{text} on {', '.join(archs)}" if archs else text for text, archs in said.items()]


def plural(number: int, noun: str) -> str:
    """Return "1 kernel" or "2 kernels"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def any_case(op: Op) -> Case:
    """Return the smallest check case, for a trial that makes no input."""
    return min(op.check_cases, key=case_size)


def case_size(case: Case) -> int:
    """Return the product of a case's sizes."""
    return Trial(case).size


def provable(op: Op) -> list[Case]:
    """Return the check cases that the tolerance rule judges best, smallest first.

    Those in fp64 only where there are no others: what plain PyTorch errs there is an estimate.
    """
    cases = [case for case in op.check_cases if case.dtype != torch.float64]
    return sorted(cases or op.check_cases, key=case_size)


def is_wide(case: Case) -> bool:
    """Return whether a case has a dimension that needs a kernel of its own."""
    return max(case.shape.values(), default=1) > WIDE


def cover(cases: Sequence[Case]) -> list[Case]:
    """Return few small cases that hold every dtype and every option value once."""
    chosen: list[Case] = []
    seen: set[str] = set()
    for case in sorted(cases, key=lambda c: (min(c.shape.values(), default=2) < 2, case_size(c))):
        marks = {str(case.dtype), *(f"{name}={value!r}" for name, value in case.options.items())}
        if not chosen or not marks <= seen:
            chosen.append(case)
            seen |= marks
    return chosen


def base_cases(op: Op, quick: bool) -> list[Case]:
    """Return small cases of more than one row and column: one if quick, else one per option."""
    chosen = cover(provable(op))
    return chosen[:1] if quick else chosen


def tile_edges(op: Op, cases: Sequence[Case], device: str) -> list[int]:
    """Return the compile-time sizes of the kernels launched for these cases, larger than one."""
    found: set[int] = set()
    for case in cases:
        refuse_fatal(Trial(case))
        inputs = make_inputs(op, Trial(case), device)
        with launches() as seen, kernels(), torch.enable_grad():
            outputs = run(op.reference, inputs, None).outputs
            run(op.function, inputs, make_upstream(outputs, Trial(case)))
        found |= {value for _, constants in seen for value in constants.values()}
    return sorted(value for value in found if 1 < value <= MAX_DERIVED_SIZE)


def resized(op: Op, case: Case, sizes: Iterable[int]) -> list[Trial]:
    """Return trials of a case with each dimension in turn set to each of the sizes."""
    trials = [
        Trial(case).resized(**{name: size})
        for name, own in case.shape.items()
        for size in sorted(set(sizes))
        if size != own
    ]
    return [trial for trial in trials if trial.size <= MAX_DERIVED_SIZE]

"""Property 10: forward and backward take no more device memory than the record declares."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nearlight.core import backend
from nearlight.core.op import Op
from nearlight.workbench.bad_source import BadSource
from nearlight.workbench.memory import extra_bytes
from nearlight.workbench.property import (
    MAX_DERIVED_SIZE,
    Property,
    base_cases,
    case_size,
    provable,
    remark,
)
from nearlight.workbench.trial import Trial, make_inputs, make_upstream, run


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """One case of each option, and the largest that the interpreter manages."""
    cases = base_cases(op, quick)
    largest = [case for case in provable(op) if case_size(case) <= MAX_DERIVED_SIZE][-1:]
    for case in [*cases, *(case for case in largest if case not in cases)]:
        yield Trial(case, seed=3)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the peak beyond inputs, outputs and gradients to `op.extra_bytes` of the case."""
    inputs = make_inputs(op, trial, device)
    with torch.no_grad():
        upstream = make_upstream(run(op.reference, inputs, None).outputs, trial)
    given = [*inputs.values(), *upstream]
    with backend.force("triton"), torch.enable_grad():
        found, _ = extra_bytes(lambda: run(op.function, inputs, upstream), given, device)
    declared = op.extra_bytes(trial.case)
    if not isinstance(declared, int) or declared < 0:
        raise BadSource(
            f"{op.name}: extra_bytes of case {trial.case.name} returned {declared!r}, allowed is a "
            "whole number of bytes from 0"
        )
    if found > declared:
        return (
            f"forward and backward take {found:,} bytes beyond inputs, outputs and gradients; the "
            f"record's extra_bytes declares {declared:,}"
        )
    remark("extra bytes stay below the declared")
    return ""


PROPERTY = Property(
    10, "memory", "peak extra bytes stay below what the record declares", trials, examine
)

"""Property 10: forward and backward take no more memory than declared, and give it back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from nearlight.workbench.trial import Trial, make_inputs, make_upstream, run, tensors

MANY_CALLS = "many calls"
NUM_CALLS = 4


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """One case of each option, the largest that the interpreter manages, and many calls of one."""
    cases = base_cases(op, quick)
    largest = [case for case in provable(op) if case_size(case) <= MAX_DERIVED_SIZE][-1:]
    for case in [*cases, *(case for case in largest if case not in cases)]:
        yield Trial(case, seed=3)
    yield Trial(cases[0], seed=3, step=MANY_CALLS)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the peak beyond inputs, outputs and gradients to `op.extra_bytes` of the case."""
    if trial.step == MANY_CALLS:
        return _kept(op, trial, device)
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


def _kept(op: Op, trial: Trial, device: str) -> str:
    """Say which memory of every one of some calls is still alive after them, or return "".

    That of one call, or of the last few, may be a cache; what grows with the calls is a leak.
    """
    calls = [_storages(op, replace(trial, seed=trial.seed + n), device) for n in range(NUM_CALLS)]
    gc.collect()
    alive = [{name for name, kept in call.items() if kept() is not None} for call in calls]
    names = [name for name in calls[0] if all(name in of_call for of_call in alive)]
    return f"after each of {NUM_CALLS} calls stays in memory: {', '.join(names)}" if names else ""


def _storages(op: Op, trial: Trial, device: str) -> dict[str, weakref.ref[Any]]:
    """Run forward and backward on new inputs; refer to the memory of all that had to do with it."""
    inputs = make_inputs(op, trial, device)
    with torch.no_grad():
        upstream = make_upstream(run(op.reference, inputs, None).outputs, trial)
    with backend.force("triton"), torch.enable_grad():
        result = run(op.function, inputs, upstream)
    named: dict[str, torch.Tensor | None] = dict(tensors(inputs))
    named |= {f"output {index}": output for index, output in enumerate(result.outputs)}
    named |= {f"the gradient of {name}": gradient for name, gradient in result.gradients.items()}
    named |= {f"the upstream gradient {index}": gradient for index, gradient in enumerate(upstream)}
    return {
        name: weakref.ref(tensor.untyped_storage())
        for name, tensor in named.items()
        if tensor is not None and tensor.numel()
    }


PROPERTY = Property(
    10,
    "memory",
    "peak extra bytes stay below what the record declares, and no call keeps memory",
    trials,
    examine,
)

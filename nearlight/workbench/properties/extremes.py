"""Property 6: empty inputs, rows of zeros, masks of one value, and the extremes of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from nearlight.core.op import Case, Extreme, Inputs, Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.flat import on_flat
from nearlight.workbench.property import Property, base_cases
from nearlight.workbench.trial import (
    Refused,
    Trial,
    kernels,
    make_inputs,
    require_refusal,
    run,
    standard,
    tensors,
)

EMPTY = "empty"
Changed = Callable[[Inputs], Inputs]


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each dimension in turn at zero, then each extreme of the record."""
    for case in base_cases(op, quick):
        for name in case.shape:
            yield Trial(case, step=EMPTY).resized(**{name: 0})
        for extreme in implied(op, case):
            yield Trial(case, step=extreme.name)
    for extreme in op.extremes:
        # On a GPU the error may be a device assertion, after which the process can do no more.
        if extreme.raises is None or device == "cpu":
            yield Trial(extreme.case, step=extreme.name)


def implied(op: Op, case: Case) -> list[Extreme]:
    """Return the extremes that the kinds of a case's inputs imply; the reference has the answer."""

    def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Changed:
        return lambda inputs: {**inputs, name: change(inputs[name])}

    found = []
    for name, tensor in tensors(make_inputs(op, Trial(case), "cpu")).items():
        if tensor.dtype == torch.bool:
            for value in (False, True):
                change = replaced(name, partial(torch.full_like, fill_value=value))
                found.append(Extreme(f"{name} all {value}", case, change, is_finite=False))
        elif tensor.is_floating_point() and tensor.ndim:
            change = replaced(name, _with_row_of_zeros)
            what = "a row of zeros" if tensor.ndim > 1 else "a zero"
            found.append(Extreme(f"{what} in {name}", case, change, is_finite=False))
    return found


def _with_row_of_zeros(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.detach().clone()
    changed[:1] = 0
    return changed.requires_grad_(tensor.requires_grad)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the results to the rule, or the expected error to be raised."""
    reason = _examine(op, trial, device)
    return f"{trial.step}: {reason}" if reason else ""


def _examine(op: Op, trial: Trial, device: str) -> str:
    if trial.step == EMPTY:
        return settle(lambda again: _empty(op, again, device), trial)
    extreme = next((e for e in op.extremes if e.name == trial.step), None)
    if extreme is None:
        known = {e.name: e for e in implied(op, trial.case)}
        if trial.step in known:
            return settle(lambda again: _implied(op, known[trial.step], again, device), trial)
        raise ValueError(f"{op.name} lists no extreme called {trial.step!r}")
    extreme = replace(extreme, change=on_flat(extreme.change))
    if extreme.raises is not None:
        return _raises(op, extreme, extreme.change(make_inputs(op, trial, device)))
    return settle(lambda again: _extreme(op, extreme, again, device), trial)


def _empty(op: Op, trial: Trial, device: str) -> Compared:
    """An empty batch must work; an op may refuse another size of zero by a ValueError."""
    expected = standard(op, trial, device)
    is_batch = next(iter(trial.case.shape.values())) == 0
    try:
        with kernels(), torch.enable_grad():
            return Compared(run(op.function, expected.inputs, expected.upstream), expected)
    except ValueError as error:
        if is_batch:
            raise
        require_refusal(op, expected.inputs, error)
        raise Refused(f"{dict(trial.case.shape)}: {error}") from error


def _implied(op: Op, extreme: Extreme, trial: Trial, device: str) -> Compared | str:
    """An op may refuse by a ValueError what its record does not speak of."""
    try:
        return _extreme(op, extreme, trial, device)
    except ValueError as error:
        require_refusal(op, extreme.change(make_inputs(op, trial, device)), error)
        raise Refused(f"{extreme.name}: {error}") from error


def _extreme(op: Op, extreme: Extreme, trial: Trial, device: str) -> Compared | str:
    expected = standard(op, trial, device, extreme.change)
    with kernels(), torch.enable_grad():
        actual = run(op.function, expected.inputs, expected.upstream)
    if extreme.is_finite:
        for name, tensor in (
            *((f"output {index}", output) for index, output in enumerate(actual.outputs)),
            *((f"gradient of {name}", gradient) for name, gradient in actual.gradients.items()),
        ):
            if tensor is not None and not bool(tensor.double().isfinite().all()):
                return f"{name}: not finite"
    return Compared(actual, expected)


def _raises(op: Op, extreme: Extreme, inputs: Inputs) -> str:
    assert extreme.raises is not None
    wanted = extreme.raises.__name__
    try:
        with kernels(), torch.enable_grad():
            run(op.function, inputs, None)
    except extreme.raises as error:
        return "" if str(error) else f"{wanted} without a message"
    except Exception as error:  # any other error is the finding
        return f"raised {type(error).__name__}, the right answer is {wanted}: {error}"
    return f"nothing was raised, the right answer is {wanted}"


PROPERTY = Property(
    6,
    "extremes",
    "empty inputs, rows of zeros, masks of one value and the record's extremes are right",
    trials,
    examine,
)

"""Property 6: empty inputs, zeros, NaN, infinities, masks of one value, the record's extremes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan

import torch

from nearlight.core.op import Case, Extreme, Inputs, Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.flat import on_flat
from nearlight.workbench.property import Property, base_cases
from nearlight.workbench.trial import (
    Refused,
    Rejected,
    Trial,
    kernels,
    make_inputs,
    require_refusal,
    run,
    standard,
    tensors,
)

EMPTY = "empty"
PLANTED = {"a NaN": nan, "an inf": inf, "a -inf": -inf}
Changed = Callable[[Inputs], Inputs]


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each dimension in turn at zero, then each extreme of the record."""
    cases = base_cases(op, quick)
    for case in cases:
        for name in case.shape:
            yield Trial(case, step=EMPTY).resized(**{name: 0})
        for extreme in implied(op, case):
            yield Trial(case, step=extreme.name)
    for extreme in planted(op, cases[0]):
        yield Trial(cases[0], step=extreme.name)
    for extreme in op.extremes:
        # On a GPU the error may be a device assertion, after which the process can do no more.
        if extreme.raises is None or device == "cpu":
            yield Trial(extreme.case, step=extreme.name)


def _replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Changed:
    return lambda inputs: {**inputs, name: change(inputs[name])}


def planted(op: Op, case: Case) -> list[Extreme]:
    """Return extremes of one NaN or infinity: it is seen in the results, or the loss hides it."""
    return [
        Extreme(
            f"{what} in {name}", case, _replaced(name, partial(_with, value=value)), is_finite=False
        )
        for name, tensor in tensors(make_inputs(op, Trial(case), "cpu")).items()
        if tensor.is_floating_point() and tensor.numel()
        for what, value in PLANTED.items()
    ]


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[changed.numel() // 2] = value
    return changed.requires_grad_(tensor.requires_grad)


def implied(op: Op, case: Case) -> list[Extreme]:
    """Return the extremes that the kinds of a case's inputs imply; the reference has the answer."""
    found = []
    for name, tensor in tensors(make_inputs(op, Trial(case), "cpu")).items():
        if tensor.dtype == torch.bool:
            for value in (False, True):
                change = _replaced(name, partial(torch.full_like, fill_value=value))
                found.append(Extreme(f"{name} all {value}", case, change, is_finite=False))
        elif tensor.is_floating_point() and tensor.ndim:
            change = _replaced(name, _with_row_of_zeros)
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
        seeds = {e.name: e for e in planted(op, trial.case)}
        if trial.step in known:
            return settle(lambda again: _implied(op, known[trial.step], again, device), trial)
        if trial.step in seeds:
            return settle(lambda again: _planted(op, seeds[trial.step], again, device), trial)
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


def _planted(op: Op, extreme: Extreme, trial: Trial, device: str) -> Compared | str:
    """Hold the results to the rule as far as no choice of formula decides.

    A NaN comes out wherever the reference has one, and in no row where it has none. Of infinities
    some orders of the same products make NaN: there, what is not finite stays not finite. So do
    gradients; where an output is lost, others may be lost with it, and that of what was put in
    itself is free. Whole numbers have no NaN to show. A reference may refuse, too.
    """
    try:
        compared = _implied(op, extreme, trial, device)
    except Rejected as error:
        raise Refused(f"{error}") from error
    if isinstance(compared, str):
        return compared
    what, _, where = extreme.name.partition(" in ")
    actual, truth = compared.actual, compared.expected.truth
    is_lost = not all(bool(output.double().isfinite().all()) for output in truth.outputs)

    def output(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if not ours.is_floating_point():
            return torch.ones_like(right, dtype=torch.bool)
        is_free = _neither_is_finite(ours, right)
        is_free &= ours.isnan() if isnan(PLANTED[what]) else ours.isnan() | right.isnan()
        if right.ndim > 1:  # which other elements of a lost row are lost, too, is free
            is_free |= ours.isnan() & ~right.isfinite().all(-1, keepdim=True)
        return is_free

    def gradient(name: str, ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        is_free = ~ours.isfinite() if is_lost else _neither_is_finite(ours, right)
        if name == where and is_lost:
            own = right.numel() // 2
            is_free.view(-1)[own] |= not bool(right.reshape(-1)[own].isnan())
        return is_free

    pairs = zip(actual.outputs, truth.outputs, strict=False)
    gradients = {
        name: _freed(ours, truth.gradients.get(name), partial(gradient, name))
        for name, ours in actual.gradients.items()
    }
    outputs = [found for pair in pairs if (found := _freed(*pair, output)) is not None]
    # A number of outputs that is wrong stays so.
    outputs += actual.outputs[len(outputs) :]
    return replace(compared, actual=replace(actual, outputs=outputs, gradients=gradients))


def _neither_is_finite(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ~ours.isfinite() & ~right.isfinite()


def _freed(
    ours: torch.Tensor | None,
    true: torch.Tensor | None,
    free: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Return our result with the truth where it is free, both given to `free` in fp64 or whole."""
    if ours is None or true is None or ours.shape != true.shape:
        return ours
    wide, right = ours.detach().contiguous(), true.detach().contiguous()
    if ours.is_floating_point():  # torch knows no arithmetic of fp8
        wide, right = wide.double(), right.double()
    return torch.where(free(wide, right), right, wide).to(ours.dtype)


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
    "empty inputs, zeros, NaN, infinities, masks of one value and the record's extremes are right",
    trials,
    examine,
)

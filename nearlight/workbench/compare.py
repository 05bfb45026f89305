"""Results held to the tolerance rule; what breaks it in one draw is drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from nearlight.core.numerics import (
    NUM_DRAWS,
    Judgement,
    failure,
    judge,
    judge_cancelled,
    redraw,
    without,
)
from nearlight.core.op import Inputs
from nearlight.workbench.property import plural
from nearlight.workbench.returned import Form, differing, is_real
from nearlight.workbench.trial import Result, Standard, Trial, tensors

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ours, plain, truth

GRADIENT = "gradient of"
CANCELLED = " where its terms cancel"


@dataclass(frozen=True)
class Compared:
    """Results and what they are held to; `label` is what the gradients are called."""

    actual: Result
    expected: Standard
    label: str = GRADIENT


@dataclass
class Leniency:
    """What `settle` granted beyond holding one draw to the rule.

    Attributes:
        num_redrawn: results drawn again.
        num_excused: elements held to the terms that cancel in them.
    """

    num_redrawn: int = 0
    num_excused: int = 0

    def remarks(self) -> list[str]:
        """Return it in words; empty where nothing was granted."""
        results = "1 result" if self.num_redrawn == 1 else f"{self.num_redrawn} results"
        entries = "1 entry" if self.num_excused == 1 else f"{self.num_excused} entries"
        found = {
            f"{results} drawn again": self.num_redrawn,
            f"{entries} held to the terms that cancel there": self.num_excused,
        }
        return [text for text, number in found.items() if number]


_leniency: ContextVar[Leniency | None] = ContextVar("leniency", default=None)


@contextmanager
def noting(granted: Leniency) -> Iterator[None]:
    """Add what `settle` grants inside the block to `granted`."""
    token = _leniency.set(granted)
    try:
        yield
    finally:
        _leniency.reset(token)


def settle(
    compute: Callable[[Trial], Compared | str], trial: Trial, num_draws: int = NUM_DRAWS
) -> str:
    """Hold the results of a trial to the tolerance rule; say how they break it, or return "".

    What breaks the rule by no more than luck may is drawn again with other seeds
    (`nearlight.core.numerics.redraw`).

    Args:
        compute: makes the results of a trial, or says at once how they are wrong.
        trial: the input.
        num_draws: further draws; 0 takes the first as it is.
    """
    first = _judgements(compute(trial))
    if isinstance(first, str):
        return first

    def draw(index: int) -> Mapping[str, Judgement]:
        again = _judgements(compute(replace(trial, seed=trial.seed + 1009 * index)), first)
        return dict.fromkeys(first, failure(again)) if isinstance(again, str) else again

    decided = redraw(first, draw, num_draws)
    if (granted := _leniency.get()) is not None:
        granted.num_redrawn += sum(judgement.num_draws > 0 for judgement in decided.values())
        granted.num_excused += sum(judgement.num_excused for judgement in decided.values())
    reasons = (f"{name}: {judgement.reason}" for name, judgement in decided.items()
               if not judgement.passed)  # fmt: skip
    return next(reasons, "")


def tensor_differs(actual: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> str:
    """Say how one tensor breaks the tolerance rule in this one draw, or return ""."""
    return _judge("", (actual, plain, truth))[""].reason


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Return whether two tensors, or none, are equal in shape, dtype and every bit."""
    if left is None or right is None:
        return left is right
    is_alike = left.shape == right.shape and left.dtype == right.dtype
    return is_alike and torch.equal(bits(left), bits(right))


def shared_with(outputs: Sequence[torch.Tensor], inputs: Inputs) -> str:
    """Say which output lies in an input's memory, or return ""; what is empty lies nowhere."""
    named = [(name, tensor) for name, tensor in tensors(inputs).items() if tensor.numel()]
    places = {tensor.untyped_storage().data_ptr(): name for name, tensor in named}
    for index, output in enumerate(outputs):
        name = places.get(output.untyped_storage().data_ptr())
        if output.numel() and name is not None:
            return f"output {index} shares its memory with {name}"
    return ""


def copies(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return a copy of every tensor, for `changed_since`."""
    return {name: tensor.detach().clone() for name, tensor in tensors(inputs).items()}


def changed_since(before: Mapping[str, torch.Tensor], inputs: Inputs) -> str:
    """Return the name of the first tensor whose bits are no longer those of its copy, or ""."""
    named = tensors(inputs).items()
    return next((name for name, tensor in named if not same_bits(before[name], tensor)), "")


def _judge(name: str, triple: Triple, terms: torch.Tensor | None = None) -> dict[str, Judgement]:
    """Apply the rule to one result; with its terms, to the rows in which these cancel apart."""
    actual, plain, truth = triple
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(actual, what), getattr(plain, what)
        if ours != theirs:
            reason = f"{what} {_short(ours)}, the reference gives {_short(theirs)}"
            return {name: failure(reason)}
    if not actual.dtype.is_floating_point:
        is_same = torch.equal(actual, plain)
        return {name: judge(actual, plain, plain) if is_same else failure("values differ")}
    dtype = actual.dtype
    if dtype.itemsize == 1:  # torch knows no arithmetic of fp8
        actual, plain, truth = actual.float(), plain.float(), truth.float()
    # Where plain PyTorch leaves the range of the dtype and the truth does not, there is no
    # error to be held to.
    overflow = ~plain.isfinite() & truth.isfinite()
    actual, plain, truth = without(overflow, actual, plain, truth)
    num_wrong = int((actual.isnan() & ~truth.isnan()).sum())
    if num_wrong:
        return {name: failure(f"{num_wrong} of {actual.numel()} elements are NaN")}
    num_lost = int((truth.isnan() & ~actual.isnan()).sum())
    if num_lost:
        reason = f"{num_lost} of {actual.numel()} elements are no NaN, the reference gives NaN"
        return {name: failure(f"{reason}; {_worst(actual, truth)}")}
    found: dict[str, Judgement] = {}
    if terms is not None:
        mask, judged = judge_cancelled(actual, plain, truth, terms, dtype)
        found[name + CANCELLED] = _placed(judged, *without(~mask, actual, truth))
        actual, plain, truth = without(mask, actual, plain, truth)
    return {name: _placed(judge(actual, plain, truth, dtype), actual, truth), **found}


def _placed(found: Judgement, actual: torch.Tensor, truth: torch.Tensor) -> Judgement:
    """Return a judgement; of a result that breaks the rule with the element furthest from it."""
    if found.passed:
        return found
    return replace(found, reason=f"{found.reason}; {_worst(actual, truth)}")


def _worst(actual: torch.Tensor, truth: torch.Tensor) -> str:
    """Return the element that is furthest from the truth: what we got, what is right, where."""
    ours, truth = (x.detach().to(truth.device, torch.float64) for x in (actual, truth))
    difference = torch.where(ours == truth, 0.0, ours - truth).abs().nan_to_num(torch.inf)
    where = torch.unravel_index(difference.argmax(), truth.shape)
    place = f" at [{', '.join(str(int(index)) for index in where)}]" if where else ""
    return f"got {float(ours[where]):.6g}, right is {float(truth[where]):.6g}{place}"


def _judgements(
    compared: Compared | str, first: Mapping[str, Judgement] | None = None
) -> dict[str, Judgement] | str:
    """Judge the results by name, or say how they differ in kind.

    Terms cost as much as eight gradients: they are asked for where a gradient breaks the rule
    without them, and in further draws where they were in the `first` one.
    """
    triples = compared if isinstance(compared, str) else _triples(compared)
    if isinstance(triples, str):
        return triples
    assert isinstance(compared, Compared)  # of words, `triples` were words, too
    found: dict[str, Judgement] = {}
    for name, triple in triples.items():
        found |= _judge(name, triple)
    if compared.expected.terms is None:
        return found
    gradients = {f"{compared.label} {name}": name for name in compared.actual.gradients}
    judged = [name for name in gradients if name in found]
    if first is None:
        doubtful = [name for name in judged if not found[name].passed]
    else:
        doubtful = [name for name in judged if name + CANCELLED in first]
    if doubtful:
        terms = compared.expected.terms()
        for name in doubtful:
            found |= _judge(name, triples[name], terms.get(gradients[name]))
    return found


def _triples(compared: Compared) -> dict[str, Triple] | str:
    """Return ours, plain and truth by name, or how the results differ in kind."""
    actual, plain, truth = compared.actual, compared.expected.plain, compared.expected.truth
    if plain.outputs and not actual.outputs:
        return "output: missing (the function returned None, or no tensor: is there a return?)"
    if len(actual.outputs) != len(plain.outputs):
        return f"{plural(len(actual.outputs), 'output')}, the reference has {len(plain.outputs)}"
    if not plain.outputs and (plain.form is not None or not actual.gradients):
        return "the reference returns no tensor, so there is nothing to compare"
    found: dict[str, Triple] = {}
    if actual.form is not None and plain.form is not None:
        if differs := differing(actual.form, plain.form):
            return differs
        found = _numbers(actual.form, plain.form, truth.form or {})
    for index, output in enumerate(actual.outputs):
        name = "output" if len(actual.outputs) == 1 else f"output {index}"
        found[name] = (output, plain.outputs[index], truth.outputs[index])
    for name, gradient in actual.gradients.items():
        label = f"{compared.label} {name}"
        want, true = plain.gradients.get(name), truth.gradients.get(name)
        if want is None or true is None:
            # The reference does not use this input: no gradient and a zero one say the same.
            if gradient is not None and bool((gradient != 0).any()):
                return f"{label}: not zero, the reference does not use {name}"
        elif gradient is None:
            return f"{label}: missing"
        else:
            found[label] = (gradient, want, true)
    return found


def _numbers(ours: Form, plain: Form, truth: Form) -> dict[str, Triple]:
    """Return the real numbers among what was returned, as tensors in fp32."""
    found: dict[str, Triple] = {}
    for place, value in ours.items():
        values = value, plain[place], truth.get(place, plain[place])
        if is_real(*values):
            actual, right, true = (torch.tensor(x, dtype=torch.float32) for x in values)
            found[f"output{place}"] = (actual, right, true.double())
    return found


def _short(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)

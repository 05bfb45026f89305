"""Results held to the tolerance rule; what breaks it in one draw is drawn again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nearlight.core import numerics
from nearlight.workbench.trial import Result, Standard, Trial

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ours, plain, truth
# A row's scale is that of its largest element; of fewer than this it says little.
MIN_ROW_WIDTH = 32
NUM_DRAWS = 32


@dataclass(frozen=True)
class Compared:
    """Results and what they are held to; `label` is what the gradients are called."""

    actual: Result
    expected: Standard
    label: str = "gradient of"


def settle(
    compute: Callable[[Trial], Compared | str], trial: Trial, num_draws: int = NUM_DRAWS
) -> str:
    """Hold the results of a trial to the tolerance rule; say how they break it, or return "".

    Where a few roundings decide (a single loss, a short row that cancels, the mean of a row far
    from zero), ours and plain PyTorch's compare by luck in one draw. So finite results that break
    the rule are drawn again with other seeds, and all draws are held to the same rule side by
    side: luck evens out, a fault does not.

    Args:
        compute: makes the results of a trial, or says at once how they are wrong.
        trial: the input.
        num_draws: of a result narrower than `MIN_ROW_WIDTH`; a quarter of it for a wider one; 1
            takes the first draw as it is.
    """
    first = compute(trial)
    triples = first if isinstance(first, str) else _triples(first)
    if isinstance(triples, str):
        return triples
    reasons = {name: tensor_differs(*triple) for name, triple in triples.items()}
    broken = {name: reason for name, reason in reasons.items() if reason}
    draws = [triples]
    for name, reason in broken.items():
        if num_draws == 1 or not _is_comparable(*triples[name]):
            return f"{name}: {reason}"
    for name in broken:
        width = triples[name][0].shape[-1] if triples[name][0].ndim else 1
        needed = num_draws if width < MIN_ROW_WIDTH else max(num_draws // 4, 2)
        while len(draws) < needed:
            again = compute(replace(trial, seed=trial.seed + 1009 * len(draws)))
            further = again if isinstance(again, str) else _triples(again)
            if isinstance(further, str):
                return further
            draws.append(further)
        columns = zip(*(draw[name] for draw in draws[:needed]), strict=True)
        if reason := tensor_differs(*(_side_by_side(parts) for parts in columns)):
            return f"{name}: {reason}"
    return ""


def tensor_differs(actual: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> str:
    """Say how one tensor breaks the tolerance rule, or return ""."""
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(actual, what), getattr(plain, what)
        if ours != theirs:
            return f"{what} {_short(ours)}, the reference gives {_short(theirs)}"
    if not actual.dtype.is_floating_point:
        return "" if torch.equal(actual, plain) else "values differ"
    # Where plain PyTorch leaves the range of the dtype and the truth does not, there is no
    # error to be held to.
    overflow = ~plain.isfinite() & truth.isfinite()
    if bool(overflow.any()):
        actual, plain, truth = actual[~overflow], plain[~overflow], truth[~overflow]
    num_wrong = int((actual.isnan() & ~truth.isnan()).sum())
    if num_wrong:
        return f"{num_wrong} of {actual.numel()} elements are NaN"
    return numerics.judge(actual, plain, truth).reason


def _is_comparable(actual: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> bool:
    """Return whether a result is finite and of the right kind, so that luck may have decided."""
    is_of_kind = actual.shape == truth.shape and actual.dtype == plain.dtype
    return is_of_kind and actual.dtype.is_floating_point and bool(actual.isfinite().all())


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts], dim=-1)


def _triples(compared: Compared) -> dict[str, Triple] | str:
    """Return ours, plain and truth by name, or how the results differ in kind."""
    actual, plain, truth = compared.actual, compared.expected.plain, compared.expected.truth
    if len(actual.outputs) not in (0, len(plain.outputs)):
        return f"{len(actual.outputs)} outputs, the reference has {len(plain.outputs)}"
    found: dict[str, Triple] = {}
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


def _short(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)

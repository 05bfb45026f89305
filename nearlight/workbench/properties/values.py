"""Property 1: values and every gradient, for inputs and upstream gradients that are not flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite

import torch

from nearlight.core.op import Op
from nearlight.workbench.compare import (
    CANCELLED,
    Compared,
    changed_since,
    copies,
    settle,
    shared_with,
)
from nearlight.workbench.property import Property, cover, is_wide, provable
from nearlight.workbench.trial import (
    UPSTREAM,
    VALUES,
    Trial,
    call,
    fresh,
    kernels,
    run,
    scaled,
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

# What a fault looks like is read from this many inputs.
NUM_DRAWS = 3


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Every case as made; then kinds of values and of upstream gradient, in turn."""
    small = cover(provable(op))
    cases = small if quick else [case for case in provable(op) if not is_wide(case)]
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
    if not quick:  # as made: what plain PyTorch errs in fp64 is an estimate
        yield from (Trial(case) for case in op.check_cases if case not in provable(op))


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold outputs and gradients to the tolerance rule."""

    def compute(trial: Trial) -> Compared:
        expected = standard(op, trial, device)
        with kernels(), torch.enable_grad():
            return Compared(run(op.function, expected.inputs, expected.upstream), expected)

    def owned(trial: Trial) -> Compared | str:
        compared = compute(trial)
        return shared_with(compared.actual.outputs, compared.expected.inputs) or compared

    reason = settle(owned, trial)
    if not reason:
        return ""
    if changed := _changed(op, trial, device):
        return f"the forward changed {changed} in place; {reason}"
    # A small result shows its kind in several draws.
    draws = [compute(replace(trial, seed=trial.seed + index)) for index in range(NUM_DRAWS)]
    name = reason.partition(":")[0].removeprefix("gradient of ").removesuffix(CANCELLED)
    hint = _kind(op, draws, name)
    return f"{reason}; {hint}" if hint else reason


def _changed(op: Op, trial: Trial, device: str) -> str:
    """Return the input that the forward changes, or "": what comes after it is then wrong, too."""
    inputs = standard(op, trial, device).inputs
    before = copies(inputs)
    with kernels(), torch.enable_grad():
        call(op.function, fresh(inputs))
    return changed_since(before, inputs)


def _kind(op: Op, draws: Sequence[Compared], name: str) -> str:
    """Say what kind of fault a wrong result shows, where its numbers tell.

    Args:
        op: whose result it is.
        draws: its results on several inputs.
        name: "output", "output 1", or the input whose gradient it is.
    """
    found = draws[0]
    if (gradient := found.actual.gradients.get(name)) is not None:
        with kernels(), torch.enable_grad():
            other = run(op.function, found.expected.inputs, scaled(found.expected.upstream, -3.0))
        again = other.gradients[name]
        if again is not None and gradient.any() and torch.equal(again, gradient):
            return "it does not depend on the upstream gradient"
    pairs = [_pair(draw, name) for draw in draws]
    if any(pair is None for pair in pairs):
        return ""
    ours, right = (torch.cat(side) for side in zip(*filter(None, pairs), strict=True))
    largest = float(right.abs().max()) if right.numel() else 0.0
    if largest and isfinite(largest):  # or squares in fp64 leave its range
        ours, right = ours / largest, right / largest
    norm = float(right.norm())
    error = float((ours - right).norm()) / norm if norm else inf
    factor = float(ours @ right) / norm**2 if norm else inf
    if isfinite(error) and float((ours - factor * right).norm()) < 0.01 * error * norm:
        return f"it is {factor:.4g} times what is right"
    for dtype in (torch.bfloat16, torch.float16):
        unit = torch.finfo(dtype).eps
        if unit / 16 <= error <= 2 * unit:
            kept = str(dtype).removeprefix("torch.")
            return f"it errs as sums and products kept in {kept} do, or as much as another formula"
    return ""


def _pair(found: Compared, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return our result and the truth, flat and in fp64; None where they do not compare."""
    sides: list[torch.Tensor | None] = []
    for result in (found.actual, found.expected.truth):
        outputs = {f"output {index}": output for index, output in enumerate(result.outputs)}
        named = {**outputs, "output": outputs.get("output 0"), **result.gradients}
        sides.append(named.get(name))
    actual, truth = sides
    if actual is None or truth is None or actual.shape != truth.shape:
        return None
    return actual.detach().double().flatten(), truth.detach().double().flatten()


PROPERTY = Property(
    1, "values", "outputs and every gradient keep the tolerance rule", trials, examine, True
)

"""Property 5: an op lives well inside autograd: modes, frozen inputs, repeats, nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from nearlight.core.op import Inputs, Op
from nearlight.workbench import settings
from nearlight.workbench.compare import (
    Compared,
    changed_since,
    copies,
    same_bits,
    settle,
    shared_with,
)
from nearlight.workbench.property import Property, base_cases, remark
from nearlight.workbench.trial import (
    Result,
    Standard,
    Trial,
    Upstream,
    call,
    differentiable,
    fresh,
    held_to,
    kernels,
    make_inputs,
    roots_of,
    run,
    scaled,
    standard,
    tensors,
)

FROZEN = "frozen "
TWO_CALLS, NEW_VALUES, MANY_CALLS = "two calls", "new values in place", "many calls"
DEFAULT_DTYPE = "default dtype"
# What a wrong result says in these steps alone.
BLAMED = {
    NEW_VALUES: "does not follow new values written in place",
    DEFAULT_DTYPE: "under torch.set_default_dtype(torch.float64)",
    MANY_CALLS: "the 12th call on the same memory does not follow its values",
}
# Above this many differentiable inputs, subsets of one, all but one and none are tried.
MAX_ALL_SUBSETS = 4


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each step on a small case of each option; each subset of frozen inputs on the first.

    Many calls take long, so they are made on one case; on a GPU `determinism` makes its own.
    """
    cases = base_cases(op, quick)
    for index, case in enumerate(cases):
        names = differentiable(make_inputs(op, Trial(case), device))
        left_out = {*([TWO_CALLS] if device != "cpu" else []), *([MANY_CALLS] if index else [])}
        for step, (_, needs_gradient) in STEPS.items():
            if (names or not needs_gradient) and step not in left_out:
                yield Trial(case, seed=index, step=step, upstream="per row")
        for frozen in _subsets(names):
            if len(frozen) < len(names) or index == 0:
                yield Trial(case, seed=index, step=FROZEN + ", ".join(frozen))


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        if len(names) <= MAX_ALL_SUBSETS or count in (1, len(names) - 1, len(names)):
            yield from combinations(names, count)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Take the trial's step with the op."""
    frozen = trial.step.removeprefix(FROZEN).split(", ")
    if not trial.step.startswith(FROZEN) and trial.step not in STEPS:
        raise ValueError(f"step {trial.step!r}: allowed are {', '.join(STEPS)}, {FROZEN}NAMES")

    def compute(trial: Trial) -> Compared | str:
        expected = standard(op, trial, device)
        with kernels(), torch.enable_grad():
            if trial.step.startswith(FROZEN):
                return _frozen(op, expected, frozen)
            return STEPS[trial.step][0](op, expected)

    reason = settle(compute, trial)
    return f"{BLAMED[trial.step]}: {reason}" if reason and trial.step in BLAMED else reason


def _without_graph(
    op: Op, expected: Standard, mode: Callable[[], AbstractContextManager[Any]]
) -> Compared | str:
    before = copies(expected.inputs)
    with mode():
        outputs = call(op.function, fresh(expected.inputs, differentiable(expected.inputs)))
    if changed := changed_since(before, expected.inputs):
        return f"under {mode.__name__} {changed} was changed in place"
    if any(output.requires_grad for output in outputs):
        return f"under {mode.__name__} the output requires a gradient"
    return Compared(Result([output.detach() for output in outputs], {}), expected)


def _frozen(op: Op, expected: Standard, frozen: list[str]) -> Compared | str:
    """Freeze some inputs: no gradient for them, the right one for the rest."""
    trainable = [name for name in differentiable(expected.inputs) if name not in frozen]
    leaves = fresh(expected.inputs, trainable)
    outputs = call(op.function, leaves)
    roots, above = roots_of(outputs, expected.upstream)
    if not trainable:
        return "everything is frozen, yet the output requires a gradient" if roots else ""
    if not roots:
        return f"the output has no gradient, though {', '.join(trainable)} is not frozen"
    # The reference says which outputs depend on what is left.
    compute = partial(run, op.reference, trainable=trainable)
    left = held_to(compute, expected.inputs, expected.upstream)
    torch.autograd.backward(roots, above)
    for name in frozen:
        if leaves[name].grad is not None:
            return f"{name} is frozen and got a gradient"
    gradients = {name: leaves[name].grad for name in trainable}
    return Compared(Result(outputs, gradients), left)


def _backward_twice(op: Op, expected: Standard) -> str:
    """A second backward through a kept graph is equal bit by bit, or raises."""
    leaves = fresh(expected.inputs)
    roots, above = roots_of(call(op.function, leaves), expected.upstream)
    wanted = [leaves[name] for name in differentiable(leaves)]

    def backward() -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(roots, wanted, above, retain_graph=True, allow_unused=True)

    first = backward()
    kept = [None if gradient is None else gradient.clone() for gradient in first]
    try:
        second = backward()
    except RuntimeError:
        return ""
    for name, old, new, returned in zip(differentiable(leaves), kept, second, first, strict=True):
        if not same_bits(old, new):
            return f"the second backward gives another gradient of {name}, silently"
        if not same_bits(old, returned):
            return f"the second backward changed the gradient of {name} that the first returned"
    return ""


def _double_backward(op: Op, expected: Standard) -> Compared | str:
    """A gradient of the gradient is right, or raises; a term that vanishes is neither."""
    try:
        actual = _second_order(op.function, expected.inputs, expected.upstream)
    except (RuntimeError, NotImplementedError):
        return ""
    second = held_to(partial(_second_order, op.reference), expected.inputs, expected.upstream)
    return Compared(actual, second, "silently wrong second derivative by")


def _second_order(function: Callable[..., object], inputs: Inputs, upstream: Upstream) -> Result:
    """Differentiate (first-order gradients + inputs) · fixed weights once more.

    The inputs stand in the sum as well, as a loss stands beside a gradient penalty: an op whose
    gradient has lost its history then drops its term without an error, and is found out.
    """
    leaves = fresh(inputs)
    roots, above = roots_of(call(function, leaves), upstream)
    wanted = [leaves[name] for name in differentiable(leaves)]
    above = [gradient.detach().clone().requires_grad_() for gradient in above]
    gradients = torch.autograd.grad(roots, wanted, above, create_graph=True, allow_unused=True)
    total = torch.zeros((), dtype=torch.float64, device=wanted[0].device)
    for index, (leaf, gradient) in enumerate(zip(wanted, gradients, strict=True)):
        weights = torch.linspace(-1, 1 + index, leaf.numel(), device=leaf.device)
        weights = weights.to(leaf.dtype).view(leaf.shape)
        total = total + (leaf * weights).double().sum()
        if gradient is not None:
            total = total + (gradient * weights.flip(0)).double().sum()
    for gradient in above:
        total = total + gradient.double().sum()
    names = [*differentiable(leaves), *(f"upstream {index}" for index in range(len(above)))]
    # Not `grad`: it passes by the node in which torch's `once_differentiable` raises.
    total.backward()
    second = [leaf.grad for leaf in [*wanted, *above]]
    return Result((), dict(zip(names, second, strict=True)))


def _unchanged(op: Op, expected: Standard) -> str:
    """Inputs and upstream gradients are bit-identical afterwards, and no version was counted."""
    leaves = fresh(expected.inputs)
    upstream = {f"the upstream gradient {i}": g for i, g in enumerate(expected.upstream)}
    watched = tensors({**leaves, **upstream})
    before, versions = copies(watched), {name: t._version for name, t in watched.items()}
    roots, above = roots_of(call(op.function, leaves), expected.upstream)
    if changed := changed_since(before, watched):
        return f"the forward changed {changed} in place"
    if roots:
        wanted = [leaves[name] for name in differentiable(leaves)]
        torch.autograd.grad(roots, wanted, above, allow_unused=True)
    if changed := changed_since(before, watched):
        return f"the backward changed {changed} in place"
    touched = [name for name, tensor in watched.items() if tensor._version != versions[name]]
    return f"{touched[0]} was written in place" if touched else ""


def _alias(op: Op, expected: Standard) -> str:
    """Outputs own their memory, and a second call leaves the first one's result alone."""
    leaves = fresh(expected.inputs)
    outputs = call(op.function, leaves)
    if shared := shared_with(outputs, leaves):
        return shared
    kept = [output.detach().clone() for output in outputs]
    results = zip(outputs, kept, call(op.function, leaves), strict=True)
    for index, (output, old, new) in enumerate(results):
        if shared_with([new], {"": output}):
            return f"output {index} of two calls is the same memory"
        if not same_bits(output.detach(), old):
            return f"a second call changed output {index} of the first"
    return ""


def _both(compute: Callable[..., Result], op: Op, *given: Any) -> Compared | str:
    """Hold what `compute(function, inputs, upstream)` gives of the op to that of its reference."""
    try:
        expected = held_to(partial(compute, op.reference), *given)
    except NotImplementedError as error:  # torch has no sum of gradients in fp8, whatever the op
        remark(f"no gradients were added up, as plain PyTorch cannot: {error}")
        return ""
    return Compared(compute(op.function, *given), expected)


def _scaled_loss(op: Op, expected: Standard, factor: float) -> Compared | str:
    """Loss × k gives gradient × k."""
    return _both(run, op, expected.inputs, scaled(expected.upstream, factor))


def _accumulated(op: Op, expected: Standard) -> Compared | str:
    """Two backward passes into one `.grad` give the sum."""

    def accumulate(function: Callable[..., object], inputs: Inputs, upstream: Upstream) -> Result:
        leaves = fresh(inputs)
        for half in (upstream, scaled(upstream, -0.5)):  # exact in any dtype
            roots, above = roots_of(call(function, leaves), half)
            torch.autograd.backward(roots, above)
        return Result((), {name: leaves[name].grad for name in differentiable(leaves)})

    return _both(accumulate, op, expected.inputs, expected.upstream)


def _one_output(op: Op, expected: Standard) -> Compared | str:
    """A loss of one output alone gives its gradient: the others have no upstream gradient."""
    used = [index for index, gradient in enumerate(expected.upstream) if gradient is not None]

    def each(function: Callable[..., Any], inputs: Inputs, upstream: Upstream) -> Result:
        found = {}
        for index in used:
            alone = [g if index == i else None for i, g in enumerate(upstream)]
            for name, gradient in run(function, inputs, alone).gradients.items():
                found[f"{name} from output {index} alone"] = gradient
        return Result((), found)

    if len(used) < 2:
        return ""
    return _both(each, op, expected.inputs, expected.upstream)


def _unasked(op: Op, expected: Standard) -> Compared | str:
    """An input whose gradient is not asked for may have none; if it has one, that is right."""
    names = [
        name
        for name, tensor in tensors(expected.inputs).items()
        if tensor.is_floating_point() and not tensor.requires_grad
    ]
    if not names:
        return ""
    try:
        actual = run(op.function, expected.inputs, expected.upstream, names)
    except (RuntimeError, ValueError, TypeError):  # refused
        return ""
    given = {name: g for name, g in actual.gradients.items() if g is not None}
    held = held_to(partial(run, op.reference, trainable=names), expected.inputs, expected.upstream)
    true = held.truth.gradients.items()
    if missing := [name for name, g in true if g is not None and name not in given]:
        remark(f"no gradient of {', '.join(missing)}, which make_inputs does not ask for")
    if not given:
        return ""
    remark(f"the gradient of {', '.join(given)} is proved here alone: make_inputs asks for none")
    plain, truth = (Result((), side.gradients) for side in (held.plain, held.truth))
    return Compared(Result((), given), replace(held, plain=plain, truth=truth))


def _default_dtype(op: Op, expected: Standard) -> Compared:
    """Another default dtype of torch's changes nothing."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Compared(run(op.function, expected.inputs, expected.upstream), expected)
    finally:
        torch.set_default_dtype(former)


def _process(op: Op, expected: Standard) -> str:
    """What a call sets for the whole process it sets back."""
    return settings.left_changed(lambda: run(op.function, expected.inputs, expected.upstream))


def _written_between(op: Op, expected: Standard) -> Compared | str:
    """An input or output written between forward and backward: right gradients, or an error."""
    wanted = differentiable(expected.inputs)
    results = [f"output {index}" for index in range(len(expected.plain.outputs))]
    given = {}
    for written in (*tensors(expected.inputs), *results):
        leaves = tree_map_only(torch.Tensor, _placed, expected.inputs)
        outputs = call(op.function, leaves)
        roots, above = roots_of(outputs, expected.upstream)
        places = tensors(leaves) | dict(zip(results, outputs, strict=False))
        try:
            with torch.no_grad():
                places[written].zero_()
            of = [leaves[name] for name in wanted]
            found = torch.autograd.grad(roots, of, above, allow_unused=True)
        except RuntimeError:
            continue
        for name, gradient in zip(wanted, found, strict=True):
            right = (result.gradients[name] for result in (expected.plain, expected.truth))
            given[f"{name}, {written} overwritten before the backward"] = (gradient, *right)
    columns = zip(*given.values(), strict=True)
    named = [Result((), dict(zip(given, column, strict=True))) for column in columns]
    if not named:
        return ""
    actual, plain, truth = named
    return Compared(actual, replace(expected, plain=plain, truth=truth, terms=None))


def _two_calls(op: Op, expected: Standard) -> str:
    """Two calls on equal inputs agree bit by bit: nothing is drawn on the host."""
    first, second = (run(op.function, expected.inputs, expected.upstream) for _ in range(2))
    outputs = zip(first.outputs, second.outputs, strict=True)
    pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {
        f"output {index}": pair for index, pair in enumerate(outputs)
    }
    for name, gradient in first.gradients.items():
        pairs[f"the gradient of {name}"] = (gradient, second.gradients[name])
    differing = next((name for name, pair in pairs.items() if not same_bits(*pair)), "")
    return f"{differing} differs between two calls on equal inputs" if differing else ""


def _follows_values(op: Op, expected: Standard, num_calls: int) -> Compared:
    """The last of some calls on the same memory is right: it follows the values written there."""
    inputs, upstream = tree_map_only(
        torch.Tensor, _placed, (expected.inputs, list(expected.upstream))
    )
    names = [name for name, tensor in tensors(inputs).items() if tensor.is_floating_point()]
    pairs = [(inputs[name], expected.inputs[name]) for name in names]
    pairs += [(g, right) for g, right in zip(upstream, expected.upstream, strict=True)
              if right is not None]  # fmt: skip
    for divisor in range(num_calls, 0, -1):  # other values each time, the expected ones at last
        for tensor, right in pairs:
            tensor.detach().copy_(right.detach().double() / divisor)
        actual = run(op.function, inputs, upstream)
    return Compared(actual, expected)


# What is done, and whether it needs an input that can be differentiated.
STEPS: dict[str, tuple[Callable[[Op, Standard], Compared | str], bool]] = {
    "no_grad": (partial(_without_graph, mode=torch.no_grad), False),
    "inference_mode": (partial(_without_graph, mode=torch.inference_mode), False),
    "inputs unchanged": (_unchanged, False),
    "outputs alias nothing": (_alias, False),
    "process": (_process, False),
    TWO_CALLS: (_two_calls, False),
    "backward twice": (_backward_twice, True),
    "double backward": (_double_backward, True),
    "loss × 2.5": (partial(_scaled_loss, factor=2.5), True),
    "loss × 0": (partial(_scaled_loss, factor=0.0), True),
    "accumulation": (_accumulated, True),
    "written between forward and backward": (_written_between, True),
    "one output": (_one_output, True),
    "gradients not asked for": (_unasked, False),
    DEFAULT_DTYPE: (_default_dtype, False),
    NEW_VALUES: (partial(_follows_values, num_calls=2), False),
    MANY_CALLS: (partial(_follows_values, num_calls=12), False),
}


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf with memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


PROPERTY = Property(
    5,
    "lifecycle",
    "right inside autograd: modes, frozen inputs, repeats, nothing changed",
    trials,
    examine,
)

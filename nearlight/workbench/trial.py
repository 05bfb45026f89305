"""A trial: one input of an op, computed three ways (the op, plain PyTorch, the truth in fp64)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from nearlight.core import backend
from nearlight.core.op import Case, Inputs, Op
from nearlight.workbench import guard, layouts
from nearlight.workbench.bad_source import BadSource
from nearlight.workbench.flat import flat, nested
from nearlight.workbench.launches import launches
from nearlight.workbench.options import accepted, noting
from nearlight.workbench.returned import Form, form_of, parts_of

# One per output; None for an output of whole numbers.
Upstream = Sequence[torch.Tensor | None]
Values = TypeVar("Values", Inputs, Upstream)
UPSTREAM = "upstream"  # the key of the upstream gradients among a trial's layouts

# Draws of the upstream gradient's signs that show how large the terms of a gradient are.
NUM_SIGNS = 8

# What is done to the first differentiable input; flat inputs hide most numerical faults.
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda x: x,
    "scale 1e-3": lambda x: x * 1e-3,
    "scale 1e3": lambda x: x * 1e3,
    "mean 30, std 0.01": lambda x: 30 + 0.01 * x,
}


@dataclass(frozen=True)
class Trial:
    """What one run of an op is made from; equal trials give equal inputs.

    Attributes:
        case: shape, dtype and options.
        seed: of the inputs and the upstream gradients.
        values: a key of `VALUES`.
        layouts: input name (or "upstream") to layout.
        upstream: "random", or "per row" with rows of very different size and one of zeros.
        step: what the property does with the input, where it does more than one thing.
    """

    case: Case
    seed: int = 0
    values: str = "as made"
    layouts: Mapping[str, str] = field(default_factory=dict)
    upstream: str = "random"
    step: str = ""

    def resized(self, **sizes: int) -> Trial:
        """Return the trial with some sizes changed."""
        shape = {**self.case.shape, **sizes}
        name = "x".join(str(size) for size in shape.values())
        return replace(self, case=replace(self.case, name=name, shape=shape))

    @property
    def size(self) -> int:
        """A measure of how much work the trial is."""
        total = 1
        for size in self.case.shape.values():
            total *= max(size, 1)
        return total


class Rejected(Exception):  # not an error: the answer "no such input"
    """The op's own `make_inputs` or `reference` does not take this shape."""


class Refused(Rejected):
    """The op's function answers this shape with a ValueError of its own."""


@dataclass(frozen=True)
class Result:
    """What one way of computing gave.

    Attributes:
        outputs: the tensors that were returned.
        gradients: by input name.
        form: what was returned by its place; None where it is not compared.
    """

    outputs: Sequence[torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    form: Form | None = None


def make_inputs(op: Op, trial: Trial, device: str) -> Inputs:
    """Return the trial's inputs, flat: `call` gives them to the op's function.

    Raises:
        Rejected: the op does not make inputs of this shape.
    """
    generator = torch.Generator(device=device).manual_seed(trial.seed)
    case, options = noting(trial.case)
    try:
        made = op.make_inputs(case, torch.device(device), generator)
    except (ValueError, RuntimeError, AssertionError, IndexError, ZeroDivisionError) as error:
        raise Rejected(f"make_inputs: {error}") from error
    if not isinstance(made, Mapping):
        raise BadSource(
            f"{op.name}: make_inputs returned a {type(made).__name__} for case {trial.case.name}, "
            "allowed is a dict of the function's arguments by name"
        )
    inputs = {**accepted(op, trial.case, options), **flat(made)}
    inputs.pop("backend", None)  # the harness says which one runs
    first = next(iter(differentiable(inputs)), None)
    if first is not None and trial.values != "as made":
        changed = VALUES[trial.values](inputs[first].detach().double()).to(inputs[first].dtype)
        inputs[first] = changed.requires_grad_()
    for name, layout in trial.layouts.items():
        if name != UPSTREAM:
            inputs[name] = layouts.apply(layout, inputs[name])
    return inputs


def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the inputs that are tensors."""
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def differentiable(inputs: Inputs) -> list[str]:
    """Return the names of the inputs whose gradient is asked for."""
    return [name for name, tensor in tensors(inputs).items() if tensor.requires_grad]


def flatten(returned: Any) -> list[torch.Tensor]:
    """Return the tensors among what a function returned, in order."""
    return [part for _, part in parts_of(returned) if isinstance(part, torch.Tensor)]


def call(function: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
    """Return the tensors that a function returns for flat inputs."""
    return flatten(function(**nested(inputs)))


def fresh(inputs: Inputs, trainable: Sequence[str] | None = None) -> Inputs:
    """Return the inputs with every tensor as a new leaf over the same memory.

    Args:
        inputs: as `make_inputs` gives them.
        trainable: names that get `requires_grad`; by default those that have it.
    """
    wanted = differentiable(inputs) if trainable is None else trainable
    leaves = {
        name: tensor.detach().requires_grad_(name in wanted)
        for name, tensor in tensors(inputs).items()
    }
    return {**inputs, **leaves}


def to_dtype(values: Values, dtype: torch.dtype) -> Values:
    """Return inputs or upstream gradients with every floating tensor in another dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

    found: Values = tree_map_only(torch.Tensor, cast, values)
    return found


def run(
    function: Callable[..., Any],
    inputs: Inputs,
    upstream: Upstream | None,
    trainable: Sequence[str] | None = None,
) -> Result:
    """Call a function and differentiate it; `upstream=None` runs the forward alone."""
    given = fresh(inputs, trainable)
    parts = dict(parts_of(function(**nested(given))))
    outputs = [part for part in parts.values() if isinstance(part, torch.Tensor)]
    form = form_of(parts)
    wanted = differentiable(given)
    roots, above = roots_of(outputs, upstream or ())
    if any(root.shape != gradient.shape for root, gradient in zip(roots, above, strict=True)):
        return Result(outputs, {}, form)  # a wrong shape has no gradient, and says more
    if not roots or not wanted:
        return Result(outputs, dict.fromkeys(wanted), form)
    gradients = torch.autograd.grad(
        roots, [given[name] for name in wanted], above, allow_unused=True
    )
    return Result(outputs, dict(zip(wanted, gradients, strict=True)), form)


def roots_of(
    outputs: Sequence[torch.Tensor], upstream: Upstream
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that can be differentiated and their upstream gradients."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, upstream, strict=False)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def scaled(upstream: Upstream, factor: float) -> Upstream:
    """Return the upstream gradients times a factor."""
    # In fp64, because fp8 has no product.
    return [g if g is None else (g.double() * factor).to(g.dtype) for g in upstream]


def make_upstream(outputs: Sequence[torch.Tensor], trial: Trial) -> Upstream:
    """Return an upstream gradient for each floating output, None for the others."""
    upstream: list[torch.Tensor | None] = []
    for index, output in enumerate(outputs):
        if not output.dtype.is_floating_point:
            upstream.append(None)
            continue
        generator = torch.Generator(device=output.device).manual_seed(trial.seed + 7919 + index)
        shape, device = output.shape, output.device
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
        if trial.upstream == "per row" and output.ndim and output.numel():
            num_rows = output.numel() // max(shape[-1], 1) if output.ndim > 1 else output.numel()
            row_shape = (*shape[:-1], 1) if output.ndim > 1 else shape
            scale = torch.logspace(-2, 2, num_rows, dtype=torch.float64, device=device)
            scale[num_rows // 2] = 0
            values = values * scale.view(row_shape)
        gradient = values.to(output.dtype)
        layout = trial.layouts.get(UPSTREAM, "contiguous")
        # A scalar loss beside a tensor output has no dimension to expand.
        with contextlib.suppress(ValueError):
            gradient = layouts.apply(layout, gradient)
        upstream.append(gradient)
    return upstream


@dataclass(frozen=True)
class Standard:
    """What an op's results are held to on one input.

    Attributes:
        inputs: of the trial.
        upstream: gradients of the outputs.
        plain: what plain PyTorch computes.
        truth: what the reference computes in fp64.
        terms: by input, how large its true gradients are without the upstream gradient's pattern,
            in which they may cancel; computed when asked for, None where it is not known.
    """

    inputs: Inputs
    upstream: Upstream
    plain: Result
    truth: Result
    terms: Callable[[], Mapping[str, torch.Tensor]] | None = None


def standard(
    op: Op, trial: Trial, device: str, change: Callable[[Inputs], Inputs] | None = None
) -> Standard:
    """Make a trial's inputs and compute plain PyTorch's results and the truth on them.

    Args:
        op: whose inputs and reference.
        trial: what to make.
        device: "cpu" or "cuda".
        change: `(inputs) -> inputs`, applied last.

    Raises:
        Rejected: the op's `make_inputs` or `reference` does not take this shape.
    """
    inputs = make_inputs(op, trial, device)
    try:
        if change is not None:
            inputs = change(inputs)
        with torch.enable_grad():
            versions = {name: tensor._version for name, tensor in tensors(inputs).items()}
            outputs = run(op.reference, inputs, None).outputs
            for name, tensor in tensors(inputs).items():
                if tensor._version != versions[name]:
                    raise BadSource(
                        f"{op.name}: the reference changes {name} in place, so that nothing is "
                        "left to compare; let function and reference return new tensors"
                    )
            upstream = make_upstream(outputs, trial)
            return held_to(partial(run, op.reference), inputs, upstream, seed=trial.seed)
    except BadSource:
        raise
    except (ValueError, RuntimeError, AssertionError, IndexError, ZeroDivisionError) as error:
        raise Rejected(f"reference: {error}") from error


def held_to(
    compute: Callable[[Inputs, Upstream], Result],
    inputs: Inputs,
    upstream: Upstream,
    *,
    seed: int = 0,
    wide: torch.dtype = torch.float64,
) -> Standard:
    """Return what a way of computing gives in plain PyTorch, and in fp64 as the truth.

    A result in fp64 may be the truth itself: what fp64 errs is taken from fp32.

    Args:
        compute: `(inputs, upstream) -> Result`.
        inputs: of a trial.
        upstream: gradients of the outputs.
        seed: of the signs that show how large the terms of a gradient are.
        wide: dtype of the truth; fp32 where fp64 does not fit.
    """
    double, single = torch.float64, torch.float32
    truth = compute(to_dtype(inputs, wide), to_dtype(upstream, wide))
    plain = compute(inputs, upstream)
    terms = partial(_terms, compute, inputs, upstream, seed, wide)
    if all(t is None or t.dtype != double for t in (*plain.outputs, *plain.gradients.values())):
        return Standard(inputs, upstream, plain, truth, terms)
    # Held to the truth of the same rounded inputs: what these lost is no error of the computing.
    few, above = to_dtype(inputs, single), to_dtype(upstream, single)
    narrow, near = compute(few, above), compute(to_dtype(few, double), to_dtype(above, double))
    outputs = map(_rounded_to_fp64, plain.outputs, narrow.outputs, near.outputs)
    gradients = {
        name: _rounded_to_fp64(given, narrow.gradients[name], near.gradients[name])
        for name, given in plain.gradients.items()
    }
    return Standard(inputs, upstream, replace(plain, outputs=[*outputs], gradients=gradients),
                    truth, terms)  # fmt: skip


def _rounded_to_fp64(plain: Any, narrow: Any, near: Any) -> Any:
    """Return a result; in fp64 with the error of fp32, made as much smaller as fp64 is finer."""
    if plain is None or plain.dtype != torch.float64:
        return plain
    shrink = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    error = (narrow.double() - near) * shrink
    return plain + torch.where(error.isfinite(), error, 0.0)


def _terms(
    compute: Callable[[Inputs, Upstream], Result],
    inputs: Inputs,
    upstream: Upstream,
    seed: int,
    wide: torch.dtype,
) -> Mapping[str, torch.Tensor]:
    """Return the largest of true gradients under the upstream gradients with random signs.

    None where they do not fit in memory: results are then held to the rule without them.
    """
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    try:
        given, above = to_dtype(inputs, wide), to_dtype(upstream, wide)
        for _ in range(NUM_SIGNS):
            signed = [g if g is None else g * _signs(g, generator) for g in above]
            with torch.enable_grad():
                gradients = compute(given, signed).gradients
            for name, gradient in gradients.items():
                if gradient is not None:
                    largest = found.get(name, gradient.abs())
                    found[name] = torch.maximum(largest, gradient.abs())
    except torch.OutOfMemoryError:
        return {}
    return found


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(2, like.shape, generator=generator, dtype=torch.int8)
    return 1 - 2 * bits.to(like.device)


def require_refusal(op: Op, inputs: Inputs, error: ValueError) -> None:
    """Raise the op's error again unless its function refuses the inputs before it launches.

    Whatever a launcher, a compiler or a backward pass raises is a fault and no refusal.
    """
    if isinstance(error, BadSource):
        raise error
    with launches() as seen, backend.force("triton"), torch.no_grad():
        try:
            call(op.function, fresh(inputs, ()))
        except ValueError:
            if not seen:
                return
    raise error


@contextmanager
def kernels() -> Iterator[guard.Guard]:
    """Run our kernels inside the block, on CPU tensors too, between guard zones."""
    with backend.force("triton"), guard.guarded() as zones:
        yield zones

"""What `bench` and `tune` time: one implementation doing one case, held to the tolerance rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nearlight.core.errors import MissingPart, one_line
from nearlight.core.hardware import Gpu
from nearlight.core.numerics import NUM_DRAWS
from nearlight.core.op import Case, Inputs, Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.flat import nested
from nearlight.workbench.trial import (
    Result,
    Standard,
    Trial,
    Upstream,
    call,
    differentiable,
    flatten,
    fresh,
    held_to,
    make_inputs,
    make_upstream,
    roots_of,
    run,
    tensors,
)

# Sets of inputs that the timer rotates through.
NUM_SETS = 3


@dataclass(frozen=True)
class Machine:
    """Where it is measured: the device of the tensors and the GPU whose limits count."""

    device: str
    gpu: Gpu


@dataclass(frozen=True)
class Work:
    """One implementation doing one case in one direction, on its own copies of the inputs."""

    function: Callable[..., Any]
    sets: Sequence[Inputs]
    upstream: Upstream | None

    def calls(self) -> list[Callable[[], Any]]:
        """Return a call for each set of inputs."""
        return [timed_call(self.function, inputs, self.upstream) for inputs in self.sets]


def timed_call(
    function: Callable[..., Any], inputs: Inputs, upstream: Upstream | None
) -> Callable[[], None]:
    """Return what is timed: the forward without a graph, or forward and every gradient."""
    forward = partial(function, **nested(inputs))  # so that no list is put together in the timing

    def step() -> None:
        if upstream is None:
            with torch.no_grad():
                forward()
            return
        roots, above = roots_of(flatten(forward()), upstream)
        wanted = [inputs[name] for name in differentiable(inputs)]
        torch.autograd.grad(roots, wanted, above, allow_unused=True)

    return step


def compute(function: Callable[..., Any], inputs: Inputs, upstream: Upstream | None) -> Result:
    """Return what a function gives; without upstream gradients, of the forward alone."""
    if upstream is not None:
        found = run(function, inputs, upstream)
        # Without their graph: it would keep the inputs alive, a truth's in fp64 among them.
        return Result([output.detach() for output in found.outputs], found.gradients)
    with torch.no_grad():
        return Result(call(function, inputs), {})


def cloned(inputs: Inputs) -> Inputs:
    """Return copies, because some peers write their gradients over what they were given."""
    copies = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        for name, value in tensors(inputs).items()
    }
    return {**inputs, **copies}


def expected_of(op: Op, inputs: Inputs, trial: Trial, is_backward: bool) -> tuple[Standard, str]:
    """Return what results are held to, by the rule of `check`, and what the truth is.

    That is the reference in fp64, in fp32 where that does not fit.

    Raises:
        MissingPart: it fits in neither.
    """
    with torch.no_grad():
        outputs = call(op.reference, fresh(inputs, ()))
    upstream: Upstream = []
    if is_backward:  # of a loss it is 1, as `loss.backward()` has it
        upstream = [torch.ones_like(gradient) if gradient is not None and not gradient.ndim
                    else gradient for gradient in make_upstream(outputs, trial)]  # fmt: skip
    del outputs

    def reference(inputs: Inputs, upstream: Upstream) -> Result:
        return compute(op.reference, inputs, upstream if is_backward else None)

    for dtype in (torch.float64, torch.float32):
        try:
            held = held_to(reference, inputs, upstream, seed=trial.seed, wide=dtype)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        else:
            name = str(dtype).removeprefix("torch.")
            return held, f"{name} reference"
    raise MissingPart(
        f"{op.name} {trial.case.name}: its reference fits on this GPU in no precision"
    )


def differs_before(
    op: Op,
    function: Callable[..., Any],
    case: Case,
    machine: Machine,
    expected: Standard,
    is_backward: bool,
    num_draws: int = NUM_DRAWS,
) -> str:
    """Say how an implementation breaks the tolerance rule on the first inputs, or return ""."""

    def compared(trial: Trial) -> Compared:
        held = expected
        if trial.seed:
            inputs = make_inputs(op, trial, machine.device)
            held, _ = expected_of(op, inputs, trial, is_backward)
        upstream = held.upstream if is_backward else None
        return Compared(compute(function, cloned(held.inputs), upstream), held)

    return settle(compared, Trial(case), num_draws)


def differs_after(op: Op, work: Work, case: Case, machine: Machine) -> str:
    """Hold ours to the rule once more, on new values written where the timed inputs lie.

    Work that is skipped for inputs seen before, or a result kept by their addresses, shows. What
    is raised here is said as well: there is more to time.
    """
    is_backward = work.upstream is not None

    def compared(trial: Trial) -> Compared:
        inputs = make_inputs(op, trial, machine.device)
        held, _ = expected_of(op, inputs, trial, is_backward)
        timed = work.sets[trial.seed % NUM_SETS]
        pairs: list[tuple[Any, Any]] = [(timed[name], new) for name, new in tensors(inputs).items()]
        pairs += zip(work.upstream or (), held.upstream, strict=True)
        with torch.no_grad():
            for old, new in pairs:
                if new is not None:
                    old.copy_(new)
        return Compared(compute(work.function, timed, work.upstream), held)

    try:
        return settle(compared, Trial(case, seed=NUM_SETS), NUM_DRAWS)
    except Exception as error:
        return f"raised {one_line(error)}"

"""Property 2: any layout of any input and of the upstream gradient, or a clear refusal."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nearlight.core.op import Case, Op
from nearlight.workbench import layouts
from nearlight.workbench.flat import refused_layouts
from nearlight.workbench.properties import values
from nearlight.workbench.property import Property, base_cases, is_wide, provable
from nearlight.workbench.trial import (
    UPSTREAM,
    Refused,
    Trial,
    differentiable,
    make_inputs,
    make_upstream,
    run,
    tensors,
)


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each layout of each tensor alone, then all tensors at once."""
    _check_declared(op)
    cases = base_cases(op, quick)
    for index, case in enumerate(cases):
        choose = layouts.one_of_each_family if quick or index else layouts.names
        named = _tensors_of(op, case, device)
        for name, tensor in named.items():
            for layout in choose(tensor):
                yield Trial(case, layouts={name: layout})
        for layout in ("transposed", "strided [::2] dim -1", "offset"):
            fitting = {
                name: layout
                for name, tensor in named.items()
                if tensor.ndim >= (2 if layout == "transposed" else 1)
                and layouts.family(layout) not in refused_layouts(op, name)
            }
            if fitting:
                yield Trial(case, layouts=fitting, upstream="per row")
    # Wide rows have kernels of their own; their strides tell where there is more than one row.
    for case in [] if quick else provable(op):
        if is_wide(case) and min(case.shape.values()) > 1:
            for name, tensor in _tensors_of(op, case, device).items():
                if tensor.ndim > 1:
                    yield Trial(case, layouts={name: "sliced [1:] dim -1"})


def _tensors_of(op: Op, case: Case, device: str) -> dict[str, torch.Tensor]:
    """Return the inputs that are tensors, and the upstream gradient of most dimensions."""
    inputs = make_inputs(op, Trial(case), device)
    outputs = run(op.reference, inputs, None).outputs
    upstream = [g for g in make_upstream(outputs, Trial(case)) if g is not None]
    named = tensors(inputs)
    if upstream and differentiable(inputs):
        named[UPSTREAM] = max(upstream, key=lambda gradient: gradient.ndim)
    return named


def examine(op: Op, trial: Trial, device: str) -> str:
    """Hold the results to the rule; a declared layout may be refused, by an error that names it."""
    may_refuse = [
        name
        for name, layout in trial.layouts.items()
        if layouts.family(layout) in refused_layouts(op, name)
    ]
    try:
        reason = values.examine(op, trial, device)
        kinds = ", ".join(f"{name} {layout}" for name, layout in trial.layouts.items())
        return f"{kinds}: {reason}" if reason else ""
    except (ValueError, TypeError) as error:
        if not may_refuse:
            raise
        if not any(name.partition("[")[0] in str(error) for name in may_refuse):
            return f"the refusal does not name {' or '.join(may_refuse)}: {error}"
        raise Refused(f"{dict(trial.layouts)}: {error}") from error


def _check_declared(op: Op) -> None:
    for name, families in op.refused_layouts.items():
        unknown = set(families) - set(layouts.FAMILIES)
        if unknown:
            raise ValueError(
                f"{op.name}.refused_layouts[{name!r}]: {', '.join(sorted(unknown))}; "
                f"allowed are {', '.join(layouts.FAMILIES)}"
            )


PROPERTY = Property(
    2,
    "layouts",
    "every layout of every input and upstream gradient gives the same, or is refused as declared",
    trials,
    examine,
    True,
)

"""Ops that take lists of tensors, seen as ops of single ones: `xs` becomes `xs[0]` and `xs[1]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from nearlight.core.op import Case, Extreme, Inputs, Op


def flattened(op: Op) -> Op:
    """Return an op without lists of tensors among its inputs; the op itself where it has none."""
    try:
        case = min((*op.check_cases, *op.cases), key=lambda case: sum(case.shape.values()))
        inputs = op.make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    except Exception:  # what is wrong with them, the first trial says
        return op
    if not any(map(_is_list, inputs.values())):
        return op

    def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        return _flat(op.make_inputs(case, device, generator))

    def of_extreme(extreme: Extreme) -> Extreme:
        return replace(extreme, change=lambda inputs: _flat(extreme.change(_nested(inputs))))

    return replace(
        op,
        function=_of_flat(op.function),
        reference=_of_flat(op.reference),
        make_inputs=make_inputs,
        extremes=[of_extreme(extreme) for extreme in op.extremes],
        peers={name: partial(_peer, factory) for name, factory in op.peers.items()},
    )


def refused_layouts(op: Op, name: str) -> Sequence[str]:
    """Return the families of layouts that an op's record may refuse for an input."""
    return op.refused_layouts.get(name.partition("[")[0], ())


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value)


def _flat(inputs: Inputs) -> Inputs:
    found: Inputs = {}
    for name, value in inputs.items():
        parts = enumerate(value) if _is_list(value) else ()
        found |= {f"{name}[{index}]": part for index, part in parts} or {name: value}
    return found


def _nested(inputs: Inputs) -> Inputs:
    found: Inputs = {}
    for name, value in inputs.items():
        whole, bracket, _ = name.partition("[")
        if bracket:
            found.setdefault(whole, []).append(value)
        else:
            found[name] = value
    return found


def _peer(factory: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    return _of_flat(factory())


def _of_flat(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(**inputs: Any) -> Any:
        return function(**_nested(inputs))

    return call

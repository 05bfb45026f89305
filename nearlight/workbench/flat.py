"""Lists of tensors among an op's inputs, seen as single ones: `xs` becomes `xs[0]` and `xs[1]`.

Inputs are flat wherever the workbench holds them; a function gets its lists when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nearlight.core.op import Inputs, Op


def flat(inputs: Mapping[str, Any]) -> Inputs:
    """Return inputs with an entry for each part of a list that holds tensors."""
    found: Inputs = {}
    for name, value in inputs.items():
        parts = enumerate(value) if _is_list(value) else ()
        found |= {f"{name}[{index}]": part for index, part in parts} or {name: value}
    return found


def nested(inputs: Inputs) -> Inputs:
    """Return inputs with the lists that `flat` took apart."""
    found: Inputs = {}
    for name, value in inputs.items():
        whole, bracket, _ = name.partition("[")
        if bracket:
            found.setdefault(whole, []).append(value)
        else:
            found[name] = value
    return found


def on_flat(change: Callable[[Inputs], Inputs]) -> Callable[[Inputs], Inputs]:
    """Return a change of an op's inputs as one of flat inputs."""
    return lambda inputs: flat(change(nested(inputs)))


def refused_layouts(op: Op, name: str) -> Sequence[str]:
    """Return the families of layouts that an op's record may refuse for an input."""
    return op.refused_layouts.get(name.partition("[")[0], ())


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value)

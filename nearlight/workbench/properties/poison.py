"""Property 7: every element is written, and nothing before or beyond a tensor is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nearlight.core.op import Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.guard import Guard
from nearlight.workbench.property import (
    MAX_DERIVED_SIZE,
    Property,
    base_cases,
    is_wide,
    provable,
    resized,
    tile_edges,
)
from nearlight.workbench.trial import (
    Result,
    Standard,
    Trial,
    kernels,
    run,
    standard,
    tensors,
)


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Every case, and each dimension one less and one more than each tile edge."""
    cases = base_cases(op, quick)
    # Wide rows and long columns have kernels of their own.
    for case in cases if quick else provable(op):
        yield Trial(case, seed=2)
        if is_wide(case):
            few = {name: 3 for name, size in case.shape.items() if size < 3}  # no power of two
            yield Trial(case, seed=2).resized(**few)
    tiles = tile_edges(op, cases[:1], device)
    if quick:
        tiles = [tile for tile in tiles if tile <= MAX_DERIVED_SIZE >> 8][:2]
    sizes = [size for tile in tiles for size in (tile - 1, tile + 1)]
    for case in cases[:1] if quick else cases[:3]:
        yield from resized(op, case, sizes)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Run between guard zones: inputs, upstream gradients, and all that the launcher allocates."""
    return settle(lambda again: _between_zones(op, again, device), trial)


def _between_zones(op: Op, trial: Trial, device: str) -> Compared | str:
    zones, actual, expected = _guarded(op, trial, device)
    if broken := zones.broken():
        return f"wrote {broken[0]}"
    if zones.reads:
        return f"read {zones.reads[0]}"
    pairs = zip(actual.outputs, expected.truth.outputs, strict=False)
    results: dict[str, Any] = {f"output {index}": pair for index, pair in enumerate(pairs)}
    for name, gradient in actual.gradients.items():
        results[f"the gradient of {name}"] = (gradient, expected.truth.gradients.get(name))
    for name, (result, truth) in results.items():
        if result is None or truth is None or result.shape != truth.shape:
            continue
        num_nan = int((result.isnan() & ~truth.isnan()).sum())
        if num_nan:
            return (
                f"{num_nan} of {result.numel()} elements of {name} were never written, or hold "
                "what was read beyond a tensor or before it was written"
            )
    return Compared(actual, expected)


def written_beyond(op: Op, trial: Trial, device: str) -> str:
    """Return what an input has the op write beyond a tensor, or ""."""
    zones, _, _ = _guarded(op, trial, device)
    return "; ".join(zones.broken())


def _guarded(op: Op, trial: Trial, device: str) -> tuple[Guard, Result, Standard]:
    expected = standard(op, trial, device)
    with kernels() as zones, torch.enable_grad():
        placed = dict(expected.inputs)
        for name, tensor in tensors(expected.inputs).items():
            placed[name] = zones.place(tensor, name).requires_grad_(tensor.requires_grad)
        upstream = [
            None if gradient is None else zones.place(gradient, "the upstream gradient")
            for gradient in expected.upstream
        ]
        actual = run(op.function, placed, upstream)
    return zones, actual, expected


PROPERTY = Property(
    7,
    "poison",
    "every element is written, nothing beyond a tensor is touched",
    trials,
    examine,
    True,
)

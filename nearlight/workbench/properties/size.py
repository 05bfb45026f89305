"""Property 4: beyond 2³¹ elements the last rows are still right."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nearlight.core.op import Inputs, Op
from nearlight.workbench.compare import tensor_differs
from nearlight.workbench.property import NotApplicable, Property
from nearlight.workbench.trial import (
    Trial,
    differentiable,
    kernels,
    make_inputs,
    make_upstream,
    run,
    tensors,
    to_dtype,
    upstream_in_fp64,
)

LAST_ROWS = 8


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Yield the op's large cases, on a GPU."""
    if not op.large_cases:
        raise NotApplicable("the record names no case past 2³¹ elements")
    if device == "cpu":
        raise NotApplicable("an interpreted program takes as long as a compiled one takes grids: "
                            "run it with a GPU")  # fmt: skip
    for case in op.large_cases:
        yield Trial(case)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Run the whole input, and hold its last rows to the reference of those rows alone."""
    inputs = make_inputs(op, trial, device)
    num_rows = next(iter(tensors(inputs).values())).shape[0]
    with kernels(), torch.no_grad():
        upstream = make_upstream(run(op.function, inputs, None).outputs, trial)
    with kernels(), torch.enable_grad():
        whole = run(op.function, inputs, upstream)
    tail = _last_rows(inputs, num_rows)
    above = [u[-LAST_ROWS:] if u is not None and len(u.shape) and u.shape[0] == num_rows else u
             for u in upstream]  # fmt: skip
    plain = run(op.reference, tail, above)
    truth = run(op.reference, to_dtype(tail, torch.float64), upstream_in_fp64(above))
    found = [
        (f"output {index}", output, plain.outputs[index], truth.outputs[index])
        for index, output in enumerate(whole.outputs)
        if output.ndim and output.shape[0] == num_rows
    ]
    for name in differentiable(tail):
        gradient, expected, true = (r.gradients[name] for r in (whole, plain, truth))
        if gradient is not None and gradient.shape[0] == num_rows:
            assert expected is not None and true is not None
            found.append((f"gradient of {name}", gradient, expected, true))
    for label, actual, expected, true in found:
        if reason := tensor_differs(actual[-LAST_ROWS:], expected, true):
            return f"last rows of {label}: {reason}"
    return "" if found else "nothing of the op's results has a row per input row"


def _last_rows(inputs: Inputs, num_rows: int) -> Inputs:
    cut = {
        name: tensor[-LAST_ROWS:].detach().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors(inputs).items()
        if tensor.ndim and tensor.shape[0] == num_rows
    }
    return {**inputs, **cut}


PROPERTY = Property(4, "size", "offsets past 2³¹ elements are right", trials, examine)

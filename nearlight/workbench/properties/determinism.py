"""Property 9: the same input gives the same bits each time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from nearlight.core.builds import compile_build
from nearlight.core.machine_code import MachineCode
from nearlight.core.op import Op
from nearlight.workbench.bad_source import builds_of
from nearlight.workbench.compare import bits
from nearlight.workbench.property import (
    MAX_DERIVED_SIZE,
    NeedsGpu,
    Property,
    any_case,
    base_cases,
    case_size,
    plural,
    provable,
    remark,
)
from nearlight.workbench.trial import Result, Trial, kernels, make_inputs, make_upstream, run

# An arch with the features of its own, and one without.
ARCHES = ("sm_80", "sm_90")
NUM_RUNS = 20
_FLOAT = r"b?f(?:16|32|64)(?:x2)?"
# PTX says it also where machine code has a loop of compare-and-swap instead: fp16, shared memory.
_IN_PTX = re.compile(
    rf"\b((?:atom|red|multimem\.\w+|cp\.reduce)\.[\w.:]*\badd\b[\w.:]*\b{_FLOAT}\b[\w.]*)"
)
_IN_SASS = re.compile(r"(?:ATOM|ATOMG|ATOMS|RED|REDG)\.(?:\w+\.)*ADD\.(?:\w+\.)*B?F(?:16|32|64)")


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """The machine code of each arch; on a GPU a small case of each option and a larger one."""
    arches = [arch for arch in ARCHES if builds_of(op, arch)]
    if device == "cpu" and not arches:
        raise NeedsGpu(
            "the interpreter runs one program after the other, which proves nothing, and the "
            "record names no builds to look for float atomics in: run it on a GPU"
        )
    for arch in arches:
        yield Trial(any_case(op), step=arch)
    if device != "cpu":
        larger = [case for case in provable(op) if case_size(case) <= MAX_DERIVED_SIZE][-1:]
        small = base_cases(op, quick)
        for case in [*small, *(case for case in larger if case not in small)]:
            yield Trial(case, seed=4)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Look for float atomics in the machine code of an arch, or run one input many times."""
    if not trial.step:
        return _differs(op, trial, device)
    builds = builds_of(op, trial.step)
    for build in builds:
        code = compile_build(build, trial.step)
        if found := float_atomics(code):
            return (
                f"{build.name} on {trial.step} sums by float atomics ({found[0]}): the result "
                "depends on the order in which blocks run"
            )
    remark(f"no float atomics in {plural(len(builds), 'kernel')}", trial.step)
    if device == "cpu" and trial.step == ARCHES[-1]:
        remark("runs are compared on a GPU alone")
    return ""


def float_atomics(code: MachineCode) -> list[str]:
    """Return the atomic additions of floating numbers in a kernel's PTX or machine code.

    Their order differs from run to run, and with it the rounding of the sum. Whole numbers and
    minima do not depend on the order.
    """
    # of all kernels of the file, this one's
    own = re.split(r"\.entry (\w+)\(", code.ptx)
    bodies = zip(own[1::2], own[2::2], strict=True)
    text = "".join(body for name, body in bodies if name == code.name)
    return [*dict.fromkeys(_IN_PTX.findall(text)), *filter(_IN_SASS.match, code.instructions)]


def _differs(op: Op, trial: Trial, device: str) -> str:
    inputs = make_inputs(op, trial, device)
    with torch.no_grad():
        upstream = make_upstream(run(op.reference, inputs, None).outputs, trial)
    first: dict[str, torch.Tensor] = {}
    for number in range(1, NUM_RUNS + 1):
        with kernels(), torch.enable_grad():
            found = _named(run(op.function, inputs, upstream))
        first = first or found
        for name, tensor in found.items():
            if num_other := int((bits(tensor) != bits(first[name])).sum()):
                return (
                    f"{name} differs between runs: {num_other} bytes of run {number} are not those "
                    "of the first"
                )
    remark(f"{NUM_RUNS} runs give the same bits")
    return ""


def _named(result: Result) -> dict[str, torch.Tensor]:
    named = {f"output {index}": output for index, output in enumerate(result.outputs)}
    gradients = {f"the gradient of {n}": g for n, g in result.gradients.items() if g is not None}
    return {name: t.detach() for name, t in (named | gradients).items()}


PROPERTY = Property(
    9, "determinism", "the same input gives the same bits each time", trials, examine
)

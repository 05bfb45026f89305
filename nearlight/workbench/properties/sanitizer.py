"""Property 11: NVIDIA's compute-sanitizer finds nothing in the op's kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nearlight.core import backend
from nearlight.core.op import Op
from nearlight.workbench.launches import launches, note_elsewhere
from nearlight.workbench.load import load_op, source_of
from nearlight.workbench.property import NeedsGpu, NotApplicable, Property, any_case, base_cases
from nearlight.workbench.trial import (
    Trial,
    make_inputs,
    make_upstream,
    run,
)

# What each tool looks for: accesses beyond memory, races on shared memory, reads of what nothing
# wrote, barriers that not all threads reach.
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TIMEOUT_S = 300
_ERROR = re.compile(
    r"^(Invalid|Uninitialized|Error: (?:Race|Potential)|Barrier error|Divergent|Misaligned)"
)
# Where a tile has fewer elements than threads, Triton lets several write the same value to one
# place. A Triton kernel cannot write different ones: its shared memory is the compiler's.
_COPIES = re.compile(
    r"Race reported between Write access at (\S+ in \S+\.py:\d+) and Write access at \1 "
)
# How the line below it begins that says where.
_PLACES = ("at ", "and ", "in ")
# torch's caching allocator hands out parts of larger blocks, in which nothing is out of bounds.
_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_DONE = "launched: "


@dataclass(frozen=True)
class Fault:
    """One error of a tool's report: what happened, and the line that says in which kernel."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} {self.where}"


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each tool once; it runs every base case in one process."""
    if not device.startswith("cuda"):
        raise NeedsGpu("compute-sanitizer watches kernels on a GPU")
    if path() is None:
        raise NotApplicable(
            "compute-sanitizer is not installed: pip install nvidia-cuda-sanitizer-api, or add "
            "the CUDA toolkit's bin folder to PATH"
        )
    if not source_of(op):
        raise NotApplicable("no file holds this record, and each tool loads it anew")
    for tool in TOOLS:
        yield Trial(any_case(op), step=tool)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Run forward and backward of all base cases under one tool, in a process of their own."""
    tool = trial.step
    if tool not in TOOLS:
        raise ValueError(f"step {tool!r}: allowed are {', '.join(TOOLS)}")
    code = f"from {__name__} import run_cases; run_cases({source_of(op)!r}, {device!r})"
    command = [str(path()), "--tool", tool, "--print-limit", "20", sys.executable, "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **_ENVIRONMENT},
    )
    names = next(
        (line for line in done.stdout.splitlines() if line.startswith(_DONE)), _DONE + "[]"
    )
    launched = json.loads(names.removeprefix(_DONE))
    note_elsewhere(launched)
    if found := faults(done.stdout, launched):
        others = f"; {len(found) - 1} more" if len(found) > 1 else ""
        return f"{tool}: {found[0]}{others}"
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        # PyTorch adds advice below the error itself.
        error = next((line for line in reversed(said) if "rror: " in line), said[-1])
        return f"{tool}: the op did not run under it: {error}"
    return "" if launched else f"{tool}: the op launched no kernel"


def path() -> str | None:
    """Return where compute-sanitizer lies, or None."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return shutil.which("compute-sanitizer") or find_nvidia_binary_utility("compute-sanitizer")


def run_cases(name: str, device: str) -> None:
    """Run an op forward and backward on its base cases; print the kernels it launched."""
    op = load_op(name)
    with launches() as seen:
        for case in base_cases(op, quick=False):
            inputs = make_inputs(op, Trial(case), device)
            upstream = make_upstream(run(op.reference, inputs, None).outputs, Trial(case))
            with backend.force("triton"):  # without guard zones, in which all is in bounds
                run(op.function, inputs, upstream)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    print(_DONE + json.dumps(sorted({kernel.split("<")[0] for kernel, _ in seen})), flush=True)


def faults(report: str, kernels: Sequence[str]) -> list[Fault]:
    """Return the errors of a report that lie in the named kernels; all, where no name is known.

    A process that an error ends says no names, and torch's own kernels are not the op's.
    """
    lines = [line.removeprefix("=========").strip() for line in report.splitlines()
             if line.startswith("=========")]  # fmt: skip
    found = []
    for index, line in enumerate(lines):
        if not _ERROR.match(line):
            continue
        block = [line]
        for following in lines[index + 1 : index + 8]:
            if not following or _ERROR.match(following):
                break
            block.append(following)
        if not kernels or any(name in text for name in kernels for text in block):
            where = next((text for text in block[1:] if text.startswith(_PLACES)), "")
            fault = Fault(line.removeprefix("Error: "), where)
            if not _COPIES.match(str(fault)):
                found.append(fault)
    return found


PROPERTY = Property(
    11, "sanitizer", "compute-sanitizer finds nothing in the op's kernels", trials, examine
)

"""Property 9: float atomics are found in machine code of both languages, and runs that differ."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

from nearlight.core.builds import compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.op import KernelBuild
from nearlight.core.triton import jit
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import determinism
from nearlight.workbench.trial import Trial

CUDA = Path(__file__).parents[1] / "kernels" / "atomics.cu"
TWINS = Path(__file__).parents[1] / "twins.py"


def scale(**fields):
    twin = sys.modules[load_op(f"{TWINS}").reference.__module__].twin("")
    return dataclasses.replace(twin, **fields)


@pytest.mark.parametrize("arch", determinism.ARCHES)
@pytest.mark.parametrize(
    ("kernel", "is_found"),
    [
        ("adds_floats", True),
        ("uses_the_old_value", True),
        ("adds_pairs_of_halves", True),
        ("adds_doubles", True),
        ("adds_in_shared_memory", True),
        ("adds_whole_numbers", False),
    ],
)
def test_cuda_kernels(kernel: str, is_found: bool, arch: str):
    build = KernelBuild(Kernel(CUDA, kernel), {}, {}, num_threads=128)
    assert bool(determinism.float_atomics(compile_build(build, arch))) == is_found


@jit
def _add_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offsets % 4, tl.load(x_ptr + offsets))


@pytest.mark.parametrize(
    ("dtype", "is_found"), [("fp32", True), ("fp16", True), ("i32", False), ("i64", False)]
)
def test_triton_kernels(dtype: str, is_found: bool):
    build = KernelBuild(_add_kernel, {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}, {"BLOCK": 128})
    for arch in determinism.ARCHES:
        assert bool(determinism.float_atomics(compile_build(build, arch))) == is_found


def test_the_row_names_the_kernel_and_the_instruction():
    build = KernelBuild(_add_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 128})
    (row,) = check(scale(builds=lambda arch: [build]), only=["determinism"]).rows
    assert row["status"] == "failed"
    assert "_add_kernel on sm_80 sums by float atomics (atom." in row["reason"]


def test_sound_builds_pass_and_none_say_nothing():
    (row,) = check(load_op(str(TWINS)), only=["determinism"]).rows
    assert (
        row["status"] == "passed"
        and "no float atomics in 1 kernel on sm_80, sm_90" in row["reason"]
    )
    (row,) = check(scale(), only=["determinism"]).rows
    assert row["status"] == "not applicable" and "run it on a GPU" in row["reason"]


def test_runs_that_differ_are_named():
    calls = itertools.count()
    trial = Trial(scale().check_cases[0], seed=4)
    assert determinism.examine(scale(), trial, "cpu") == ""

    def drifts(x, weight):
        return x * weight + (1e-6 if next(calls) == 9 else 0.0)

    reason = determinism.examine(scale(function=drifts), trial, "cpu")
    assert reason.startswith("output 0 differs between runs:") and "run 10 " in reason
    calls = itertools.count()

    def backward_drifts(x, weight):
        factor = 1 + 1e-6 * (next(calls) == 4)
        return x * weight + (x - x.detach()) * (factor - 1)

    reason = determinism.examine(scale(function=backward_drifts), trial, "cpu")
    assert reason.startswith("the gradient of x differs between runs:")


def test_on_a_gpu_a_larger_case_is_run_too():
    trials = list(determinism.trials(scale(), False, "cuda"))
    assert [trial.case.shape["rows"] for trial in trials] == [9, 400]
    assert not torch.cuda.is_available() or not determinism.examine(scale(), trials[0], "cuda")

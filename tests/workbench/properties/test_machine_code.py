"""Property 12: every build compiles for every arch and keeps its budget, in both languages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nearlight.core.builds import compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.errors import BadInput
from nearlight.core.op import KernelBuild
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import machine_code
from nearlight.workbench.trial import Trial

TWINS = Path(__file__).parents[1] / "twins.py"
CUDA = Path(__file__).parents[1] / "kernels" / "atomics.cu"


def scale(**fields):
    twin = sys.modules[load_op(str(TWINS)).reference.__module__].twin("")
    return replace(twin, **fields)


def cuda_builds(kernel: str, **fields):
    build = KernelBuild(Kernel(CUDA, kernel), {}, {}, num_threads=128, **fields)
    return lambda arch: [build]


def test_every_arch_is_summed_up_in_the_row():
    (row,) = check(scale(builds=cuda_builds("adds_floats")), only=["machine code"]).rows
    assert (row["status"], row["num_trials"]) == ("passed", 6)
    for arch in machine_code.ARCHES:
        assert arch in row["reason"]
    archs = ", ".join(machine_code.ARCHES)
    assert row["reason"].startswith(f"1 kernel, no spills on {archs}; at most ")


def test_each_arch_has_its_own_spills_and_registers(monkeypatch: pytest.MonkeyPatch):
    def compiled(build, arch):
        code = compile_build(build, arch)
        return replace(code, spill_store_bytes=8, registers=255) if arch == "sm_75" else code

    monkeypatch.setattr(machine_code, "compile_build", compiled)
    op = scale(builds=cuda_builds("adds_floats", max_spill_bytes=8))
    (row,) = check(op, only=["machine code"]).rows
    rest = ", ".join(arch for arch in machine_code.ARCHES if arch != "sm_75")
    for told in ("8 bytes of spills on sm_75", "255 registers on sm_75", f"no spills on {rest}"):
        assert f"{told};" in f"{row['reason']};", row


def test_a_local_array_is_named_beside_no_spills():
    build = KernelBuild(Kernel(CUDA.with_name("inspected.cu"), "local_array"), {}, {})
    (row,) = check(scale(builds=lambda arch: [build]), only=["machine code"], quick=True).rows
    assert row["reason"].startswith(
        "1 kernel, no spills on sm_90; a local array of 384 bytes on sm_90; at most "
    )


def test_a_launch_past_its_launch_bounds_is_a_broken_budget():
    build = KernelBuild(
        Kernel(CUDA.with_name("inspected.cu"), "copy<int>"), {}, {}, num_threads=512
    )
    (row,) = check(scale(builds=lambda arch: [build]), only=["machine code"], quick=True).rows
    assert row["status"] == "failed"
    assert row["reason"] == "copy<int> on sm_90: 512 threads, __launch_bounds__ allows 256"


def test_a_broken_budget_is_named():
    op = load_op(f"{TWINS}:TIGHT")
    reason = machine_code.examine(op, Trial(op.check_cases[0], step="sm_90"), "cpu")
    assert "registers per thread, allowed 8" in reason and "_scale_fwd_kernel on sm_90" in reason
    tight = scale(builds=cuda_builds("adds_in_shared_memory", max_registers=2))
    assert "allowed 2" in machine_code.examine(tight, Trial(op.check_cases[0], step="sm_80"), "cpu")


def test_only_the_oldest_arch_may_be_refused():
    def builds(arch: str):
        if arch in ("sm_75", "sm_100"):
            raise ValueError(f"not for {arch}")
        return cuda_builds("adds_floats")(arch)

    (row,) = check(scale(builds=builds), only=["machine code"]).rows
    assert row["status"] == "failed"
    assert row["reason"] == "scale (sound) does not compile for sm_100: not for sm_100"
    trial = Trial(scale().check_cases[0], step="sm_75")
    assert machine_code.examine(scale(builds=builds), trial, "cpu") == ""


def test_a_source_that_does_not_compile_gives_the_compilers_lines(tmp_path: Path):
    file = tmp_path / "broken.cu"
    file.write_text("__global__ void broken(float* x) {\n  x[0] = nothing;\n}\n")
    build = KernelBuild(Kernel(file, "broken"), {}, {})
    op = scale(builds=lambda arch: [build])
    for device in ("cpu", "cuda"):
        with pytest.raises(BadInput, match=r"broken\.cu\(2\): error: identifier .nothing."):
            machine_code.examine(op, Trial(op.check_cases[0], step="sm_90"), device)


def test_a_source_for_some_arches_alone_is_a_broken_property(tmp_path: Path):
    file = tmp_path / "new.cu"
    file.write_text("__global__ void new_only() {\n#if __CUDA_ARCH__ < 900\n  old;\n#endif\n}\n")
    op = scale(builds=lambda arch: [KernelBuild(Kernel(file, "new_only"), {}, {})])
    reason = machine_code.examine(op, Trial(op.check_cases[0], step="sm_80"), "cpu")
    assert "does not compile for sm_80: " in reason and "new.cu(3): error: identifier" in reason
    assert machine_code.examine(op, Trial(op.check_cases[0], step="sm_100"), "cpu") == ""


def test_no_builds_say_nothing():
    (row,) = check(scale(), only=["machine code"]).rows
    assert (row["status"], row["reason"]) == ("not applicable", "the record names no builds")


@pytest.mark.parametrize("only", ["machine code", "size", "determinism"])
@pytest.mark.parametrize("builds", [None, ["kernel"], 7])
def test_builds_that_are_none_are_bad_input(only, builds):
    message = r"scale.*: builds\('sm_\d+'\) returned .*, allowed is a sequence of KernelBuild"
    with pytest.raises(BadInput, match=message):
        check(scale(builds=lambda arch: builds), only=[only])


def test_builds_of_one_arch_that_are_none_are_bad_input():
    right = load_op(str(TWINS)).builds
    op = scale(builds=lambda arch: None if arch == "sm_75" else right(arch))
    with pytest.raises(BadInput, match=r"builds\('sm_75'\) returned None"):
        check(op, only=["machine code"])


def test_the_quick_check_compiles_the_first_build_of_each_kernel():
    def builds(arch: str):
        return [
            *cuda_builds("adds_floats")(arch),
            *cuda_builds("adds_floats", max_registers=2)(arch),
            *cuda_builds("adds_in_shared_memory")(arch),
        ]

    op = scale(builds=builds)
    (row,) = check(op, only=["machine code"], quick=True).rows
    assert (row["status"], row["num_trials"]) == ("passed", 1)
    assert row["reason"].startswith("the first build of each of 2 kernels, no spills on sm_90; ")
    (row,) = check(scale(builds=cuda_builds("adds_floats")), only=["machine code"], quick=True).rows
    assert row["reason"].startswith("1 kernel, no spills on sm_90; ")  # it has no other build
    (row,) = check(op, only=["machine code"]).rows
    assert row["status"] == "failed" and "allowed 2" in row["reason"]

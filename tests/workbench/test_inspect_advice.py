from dataclasses import replace
from pathlib import Path

import pytest

from nearlight.core import cuda
from nearlight.core.machine_code import MachineCode
from nearlight.core.occupancy import occupancy
from nearlight.core.op import KernelBuild
from nearlight.workbench.inspect import Look, inspect
from nearlight.workbench.inspect_advice import advise
from nearlight.workbench.load import load_file

HERE = Path(__file__).parent
PY = str(HERE / "inspected.py")
SUM = cuda.Kernel(HERE / "kernels" / "inspected.cu", "sum")
BUILD = KernelBuild(SUM, {}, {}, num_threads=256)
CODE = MachineCode("k", "sm_90a", 32, 0, 0, 0, 0, {"LDG.E.128": 1, "FFMA": 7}, b"")


def look(arch="sm_90a", kernel="k", is_launched_so=True, build=BUILD, **changes):
    code = replace(CODE, arch=arch, **changes)
    held = occupancy(arch, code.registers, build.num_threads, code.shared_bytes)
    return Look(kernel, arch, build, code, held, is_launched_so)


def titles(*looks):
    return [finding.title for finding in advise(looks)]


def test_sound_code_gets_no_advice():
    assert titles(look(), look("sm_80")) == []


def test_the_gravest_comes_first_and_archs_come_together():
    spilling = {"spill_store_bytes": 8, "spill_load_bytes": 12, "stack_bytes": 8}
    found = advise([
        look("sm_80", **spilling), look("sm_90a", **spilling),
        look("sm_86", shared_bytes=101 * 1024),
    ])  # fmt: skip
    assert [f.title for f in found] == [
        "cannot be launched on sm_86",
        "registers spill on sm_80, sm_90a",
    ]
    assert found[0].evidence == (
        f"sm_86: {SUM.path}:24: 103424 bytes of shared memory, a block has 101376"
    )
    assert found[1].evidence == (
        "sm_80, sm_90a: 8 bytes of spill stores and 12 of loads at 32 registers"
    )
    assert "__launch_bounds__" in found[1].next_step
    build = KernelBuild(load_file(Path(PY))._copy_kernel, {}, {}, num_threads=256)
    refused, spills = advise([look(build=build, shared_bytes=1 << 20, **spilling)])
    line = Path(PY).read_text().splitlines().index("def _copy_kernel(") + 1
    assert f"inspected.py:{line}: 1048576 bytes of shared memory" in refused.evidence
    assert "num_warps" in spills.next_step


def test_a_kernel_is_named_where_there_are_several():
    spilling = look(kernel="a", spill_load_bytes=4)
    assert titles(spilling, look(kernel="b")) == ["registers spill on sm_90a (a)"]


def test_a_block_past_its_launch_bounds_or_registers_cannot_be_launched():
    (finding,) = advise([look(num_threads=128)])
    assert finding.title == "cannot be launched on sm_90a"
    assert finding.evidence == f"sm_90a: {SUM.place}: 256 threads, __launch_bounds__ allows 128"
    assert "registers were shared out for the threads" in finding.cause
    assert finding.next_step == (
        "launch at most 128 threads in a block, or raise __launch_bounds__ to 256"
    )
    (finding,) = advise([look(registers=255, build=replace(BUILD, num_threads=512))])
    assert finding.evidence == (
        f"sm_90a: {SUM.place}: 512 threads × 255 registers, more than an SM has"
    )
    assert finding.next_step == (
        "launch fewer threads in a block, or bound its registers by __launch_bounds__(512)"
    )
    (finding,) = advise([look(build=replace(BUILD, num_threads=2048))])
    assert finding.evidence.endswith(": 2048 threads, a block has 1024")
    assert finding.next_step == "launch fewer threads in a block"


def test_local_memory_without_a_spill_is_an_array():
    array = {"stack_bytes": 384, "instructions": {"LDL": 3, "STL": 2}}
    (finding,) = advise([look(**array)])
    assert finding.title == "a local array on sm_90a"
    assert "384 bytes of stack and no spill: 3 local loads, 2 local stores" in finding.evidence
    (finding,) = advise([look(stack_bytes=8, instructions={"LDL": 1, "STL": 1})])
    assert "no spill: 1 local load, 1 local store" in finding.evidence
    assert titles(look(**array, spill_load_bytes=4)) == ["registers spill on sm_90a"]


def test_products_without_tensor_cores_are_named_and_others_are_not():
    build = replace(BUILD, uses_tensor_cores=True)
    assert titles(look(build=build)) == ["no tensor cores on sm_90a"]
    assert titles(look(ttir="%0 = tt.dot %a, %b, %c")) == ["no tensor cores on sm_90a"]
    assert titles(look(build=build, instructions={"HGMMA.64x8x16.F32": 1})) == []


def test_bf16_on_turing_runs_in_software():
    assert titles(look("sm_75", ttir="tensor<8xbf16>"), look(ttir="tensor<8xbf16>")) == [
        "bf16 in software on sm_75"
    ]


def test_few_warps_are_named_where_the_launch_is_known_and_registers_limit():
    heavy = {"registers": 200}
    (finding,) = advise([look(**heavy)])
    assert finding.title == "registers allow few warps on sm_90a"
    assert (
        finding.evidence
        == "sm_90a: 200 registers × 256 threads: 8 warps on an SM, 12% of what it holds"
    )
    assert "with 128 registers an SM holds 2 blocks instead of 1" in finding.next_step
    assert titles(look(**heavy, is_launched_so=False)) == []
    assert titles(look(**heavy, instructions={"HMMA": 1})) == []
    assert titles(look(shared_bytes=200 * 1024)) == []  # shared memory limits, not registers


@pytest.mark.parametrize(("types", "is_narrow"), [("n=i32", True), ("n=i32:16", False)])
def test_narrow_accesses_are_named_where_a_multiple_of_16_widens_them(types, is_narrow):
    findings = inspect(f"{PY}:_copy_kernel", ["sm_90"], types=types).findings
    assert [f.title for f in findings] == ["narrow accesses on sm_90a"] * is_narrow
    if is_narrow:
        assert findings[0].evidence == (
            "sm_90a: with n a multiple of 16: loads 16 → 128 bits, stores 16 → 128 bits"
        )


def test_narrow_accesses_that_nothing_widens_are_left_alone():
    options = {"types": "n=i32", "constants": "BLOCK=128"}  # one element for each thread
    assert inspect(f"{PY}:_copy_kernel", ["sm_90"], **options).findings == []

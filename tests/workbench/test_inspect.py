import re
from pathlib import Path

import pytest

from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import ARCHS, inspect
from nearlight.workbench.new import new

HERE = Path(__file__).parent
CU = str(HERE / "kernels" / "inspected.cu")
PY = str(HERE / "inspected.py")
PRODUCT = {"types": "a_ptr=*fp16,c_ptr=*fp32", "constants": "PRECISION='ieee',BLOCK=32"}


def rows(report):
    return {(row["kernel"], row["arch"]): row for row in report.rows}


def test_a_spill_is_told_from_a_local_array():
    report = inspect(CU, ["sm_90"])
    found = rows(report)
    assert list(found) == [(name, "sm_90a") for name in ("spills", "local_array", "sum")]
    spills, array = found["spills", "sm_90a"], found["local_array", "sm_90a"]
    assert spills["local_memory"] == "spills" and spills["spill_store_bytes"] > 0
    assert array["local_memory"] == "local array, no spill"
    assert array["stack_bytes"] == 96 * 4 and array["spill_store_bytes"] == 0
    assert array["local_loads"] > 0 and array["local_stores"] > 0
    assert found["sum", "sm_90a"]["local_memory"] == "none"
    assert report.answer == f"{CU}: registers spill on sm_90a (spills), and 1 more"


def test_accesses_atomics_and_barriers_are_counted():
    found = rows(inspect(CU, ["sm_80"]))
    total = found["sum", "sm_80"]
    assert (total["global_loads"], total["widest_load_bits"], total["narrower_loads"]) == (
        1,
        128,
        0,
    )
    assert total["atomics"] == 1 and total["global_stores"] == 0 and total["barriers"] == 0
    spills = found["spills", "sm_80"]
    assert (spills["global_loads"], spills["widest_load_bits"]) == (96, 32)
    assert spills["barriers"] == 1 and spills["instructions"] > 192


def test_occupancy_is_of_the_block_that_is_known():
    bound = rows(inspect(f"{CU}:copy<float>", ["sm_90"]))["copy<float>", "sm_90a"]
    assert bound["num_threads"] == 256 and bound["occupancy"] == 1.0
    assert bound["limited_by"] == "nothing"
    given = rows(inspect(f"{CU}:copy<float>", ["sm_90"], block=32))["copy<float>", "sm_90a"]
    assert (given["num_threads"], given["blocks_per_sm"], given["limited_by"]) == (32, 32, "blocks")
    unknown = inspect(f"{CU}:sum", ["sm_90"])
    assert "occupancy" not in unknown.rows[0] and unknown.next.endswith("--block 256")
    assert unknown.setup.endswith("for the occupancy say what it is launched with: --block 256")


def test_occupancy_is_not_told_where_the_launch_sizes_the_shared_memory(tmp_path):
    file = tmp_path / "dynamic.cu"
    file.write_text("""
    __global__ void __launch_bounds__(128) without(float* out) { *out = 1; }
    __global__ void __launch_bounds__(128) with(float* out) {
      extern __shared__ float tile_smem[];
      tile_smem[threadIdx.x] = out[threadIdx.x];
      __syncthreads();
      out[threadIdx.x] = tile_smem[127 - threadIdx.x];
    }
    """)
    report = inspect(str(file), ["sm_90"])
    assert [row.get("limited_by") for row in report.rows] == ["nothing", None]
    assert report.next == f"for the occupancy: nearlight inspect {file} --shared 16384"
    assert "limited_by" in inspect(str(file), ["sm_90"], shared=16384).rows[1]
    assert inspect(f"{CU}:sum", ["sm_90"], shared=64).next.endswith(":sum --shared 64 --block 256")
    (row,) = inspect(f"{file}:with", ["sm_90"], shared=100 * 1024).rows
    assert (row["shared_bytes"], row["blocks_per_sm"]) == (100 * 1024, 2)
    assert row["limited_by"] == "shared memory"


def test_a_launch_past_its_launch_bounds_has_no_occupancy(tmp_path):
    file = tmp_path / "bound.cu"
    file.write_text("__global__ void __launch_bounds__(128, 4) f(float* x) { *x = 1; }\n")
    (row,) = inspect(str(file), ["sm_90"], block=256).rows
    assert (row["num_threads"], row["blocks_per_sm"], row["occupancy"]) == (256, 0, 0.0)
    assert row["limited_by"] == "__launch_bounds__"
    (row,) = inspect(str(file), ["sm_90"], block=128).rows
    assert row["blocks_per_sm"] > 0


def test_a_matrix_product_has_no_tensor_cores_on_turing():
    report = inspect(f"{PY}:_product_kernel", ["sm_75", "sm_80", "sm_120"], **PRODUCT)
    found = {row["arch"]: row for row in report.rows}
    assert "no tensor cores on sm_75" in report.answer and "sm_80" not in report.answer
    assert found["sm_75"]["matrix_unit"] == "none" and found["sm_75"]["scalar_fmas"] > 0
    assert found["sm_80"]["matrix_unit"] == found["sm_120a"]["matrix_unit"] == "HMMA"
    assert found["sm_80"]["shared_bytes"] > 0 and found["sm_80"]["blocks_per_sm"] > 1
    assert found["sm_80"]["matrix_instructions"] > 0 == found["sm_80"]["scalar_fmas"]


def test_an_op_is_inspected_as_it_is_built():
    report = inspect(f"{HERE / 'twins.py'}", ["sm_90"])
    (row,) = report.rows
    assert row["kernel"] == "_scale_fwd_kernel fp32" and row["num_threads"] == 128
    assert "no spills" in report.answer
    assert report.next == f"with a GPU: nearlight bench {HERE / 'twins.py'}"


def test_values_of_a_users_cuda_kernels_are_proved_before_they_are_timed(tmp_path):
    new("gain", "cuda", tmp_path)
    name = f"{tmp_path / 'gain.py'}"
    assert inspect(name, ["sm_90"]).next == (
        f"with a GPU: nearlight check {name} --device cuda && nearlight bench {name}"
    )


def test_builds_of_one_kernel_are_told_apart_by_their_constants(tmp_path):
    file = tmp_path / "many.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from dataclasses import replace\nimport twins\n"
        "(build,) = twins.OP.builds('sm_80')\n"
        "builds = [replace(build, constants={**build.constants, 'BLOCK_N': n}) for n in (16, 32)]\n"
        "OP = replace(twins.OP, builds=lambda arch: builds)\n"
    )
    found = [(row["kernel"], row["constants"]) for row in inspect(str(file), ["sm_80"]).rows]
    name = "_scale_fwd_kernel fp32"
    assert found == [(f"{name} #1", "BLOCK_N=16"), (f"{name} #2", "BLOCK_N=32")]


def test_an_op_without_kernels_for_an_arch_says_so_beside_the_others(monkeypatch):
    with pytest.raises(BadInput, match="needs sm_80"):
        inspect(f"{HERE / 'twins.py'}:REFUSES_ARCH", ["sm_75"])
    with pytest.raises(BadInput, match="names no kernels"):
        inspect(f"{HERE / 'twins.py'}:UNKNOWN_FAMILY", ["sm_80"])


@pytest.mark.parametrize("archs", [["sm_91"], ["sm_80", ""], ["hopper"], ["h300"]])
def test_an_unknown_arch_is_refused(archs):
    with pytest.raises(BadInput, match="allowed are sm_75, sm_80") as error:
        inspect(CU, archs)
    assert set(ARCHS) <= set(re.findall(r"sm_\d+a?", str(error.value)))


def test_an_arch_may_be_named_by_a_gpu():
    found = [row["arch"] for row in inspect(f"{CU}:sum", ["h200", "sm_90", "RTX 4090"]).rows]
    assert found == ["sm_90a", "sm_89"]


def test_what_does_not_compile_shows_the_compilers_lines(tmp_path):
    file = tmp_path / "bad.cu"
    file.write_text("// first\n__global__ void f(int* x) {\n  x[0] = y;\n}\n")
    with pytest.raises(BadInput, match=r'bad.cu\(3\): error: identifier "y"') as error:
        inspect(str(file))
    assert "\0" not in str(error.value)
    line = (HERE / "inspected.py").read_text().splitlines().index("    offsets = tl.arange(0, 15)")
    with pytest.raises(BadInput, match=rf"inspected.py:{line + 1}: .*power of 2"):
        inspect(f"{PY}:_broken_kernel")
    with pytest.raises(BadInput, match="nothing says what"):
        inspect(f"{PY}:_product_kernel")


def test_an_op_with_a_kernel_that_no_arch_takes_is_refused(tmp_path):
    (tmp_path / "sound.cu").write_text("__global__ void sound(int* x) { x[0] = 1; }\n")
    broken = tmp_path / "broken.cu"
    broken.write_text("\n__global__ void broken(int* x) { x[0] = y; }\n")
    file = tmp_path / "op.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from dataclasses import replace\nfrom pathlib import Path\nimport twins\n"
        "from nearlight.core.cuda import Kernel\nfrom nearlight.core.op import KernelBuild\n"
        "builds = [KernelBuild(Kernel(Path(__file__).with_name(f'{n}.cu'), n), {}, {})\n"
        "          for n in ('sound', 'broken')]\n"
        "OP = replace(twins.OP, builds=lambda arch: builds)\n"
        "FAILS = replace(twins.OP, builds=lambda arch: len(arch + 1))\n"
    )
    with pytest.raises(BadInput, match=r'broken.cu\(2\): error: identifier "y" is undefined'):
        inspect(str(file), ["sm_80", "sm_90"])
    broken.unlink()
    with pytest.raises(BadInput, match="which is to have the kernel broken: No such file"):
        inspect(str(file), ["sm_80"])
    with pytest.raises(BadInput, match="the builds of .*op.py:FAILS fail: TypeError: can only"):
        inspect(f"{file}:FAILS", ["sm_80"])


def test_an_arch_without_a_type_stands_beside_those_that_have_it(tmp_path):
    report = inspect(f"{PY}:_fp8_kernel", ["sm_80", "sm_90"])
    refused, taken = report.rows
    assert "fp8e4nv not supported" in refused["refusal"] and taken["registers"] > 0
    assert report.answer.endswith("no machine code on sm_80")
    with pytest.raises(BadInput, match=r"inspected.py:\d+: .*fp8e4nv not supported"):
        inspect(f"{PY}:_fp8_kernel", ["sm_80"])


def test_one_arch_may_refuse_what_another_takes(tmp_path):
    file = tmp_path / "own.cu"
    wgmma = 'asm volatile("wgmma.fence.sync.aligned;");'
    file.write_text(f"__global__ void f(int n) {{\n  {wgmma}\n  {wgmma}\n}}\n")
    report = inspect(str(file), ["sm_80", "sm_90"])
    refused, taken = report.rows
    assert taken["kernel"] == "f" and taken["registers"] > 0
    assert [place.partition(" ")[0] for place in refused["refusal"].split("; ")] == [
        f"{file}(2):", f"{file}(3):",
    ]  # fmt: skip
    assert "wgmma" in refused["refusal"] and report.setup.startswith("1 kernel, ")
    assert report.answer == f"{file}: no machine code on sm_80 (all kernels)"
    with pytest.raises(BadInput, match=r"own.cu\(2\): error: Instruction 'wgmma.fence'"):
        inspect(str(file), ["sm_80"])


def test_two_targets_take_one_arch():
    with pytest.raises(BadInput, match="compared on one arch, not on sm_80, sm_90a"):
        inspect(CU, ["sm_80", "sm_90"], other=CU)

"""Reading cubins of Triton and of CUDA C++: spills, local arrays, matrix instructions."""

import subprocess

import pytest

from nearlight.core import cuda, machine_code

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    10992 bytes stack frame, 16416 bytes spill stores, 15772 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 10992 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 158 registers, used 1 barriers, 1040 bytes smem, 400 bytes cmem[0]
"""

SOURCE = """
extern "C" __global__ void local_array(float* out, const int* index, int n) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = out[i * 32 + threadIdx.x];
  for (int i = 0; i < n; ++i) values[index[i]] += 1.0f;
  out[threadIdx.x] = values[index[n]];
}

extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = out[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[95 - i];
}

extern "C" __global__ void shares(float* out) {
  __shared__ float tile_smem[256];
  tile_smem[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile_smem[255 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine_code")
    path = folder / "kernels.cu"
    path.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEARLIGHT_CACHE", str(folder / "cache"))
        return cuda.compile_kernel(path, "shares", "sm_90a")


@pytest.fixture(scope="module")
def compiled(cubin):
    return lambda name: machine_code.read(cubin.code, cubin.log, name, arch=cubin.arch)


def test_log_of_several_kernels():
    found = machine_code.parse_log(LOG)
    assert found == {
        "first": machine_code.Resources(64, 10992, 16416, 15772, 0, 1),
        "second": machine_code.Resources(158, 0, 0, 0, 1040, 1),
    }


def test_a_local_array_is_stack_but_no_spill(compiled):
    code = compiled("local_array")
    assert code.stack_bytes == 64 * 4
    assert code.spill_bytes == 0
    assert code.count("STL") > 0 and code.count("LDL") > 0


def test_spills_are_counted(compiled):
    code = compiled("spills")
    assert code.registers <= 32
    assert code.spill_store_bytes > 0 and code.spill_load_bytes > 0
    assert code.spill_bytes == code.spill_store_bytes + code.spill_load_bytes


def test_shared_memory_and_counts(compiled):
    code = compiled("shares")
    assert code.name == "shares" and code.arch == "sm_90a"
    assert code.shared_bytes == 256 * 4
    assert (code.count("STS"), code.count("LDS"), code.count("BAR")) == (1, 1, 1)
    assert code.count("NOP") == code.matrix_instructions == code.stack_bytes == 0
    assert sum(code.instructions.values()) > 8
    assert code.num_barriers == 1


def test_threads_of_a_block_are_read_from_the_cubin(compiled, cubin):
    assert compiled("spills").num_threads == 1024
    assert compiled("shares").num_threads == 0
    assert machine_code.num_threads(cubin.code, "nothing") == 0


def test_widths_of_accesses():
    opcodes = {"LDG.E.128": 1, "LDG.E.SYS": 2, "LDG.E.U8": 4, "LDG.E.ENL2.256": 1, "LDS.128": 9,
               "LDGSTS.E.BYPASS.LTC128B.64": 3, "STG.E.U16": 1}  # fmt: skip
    code = machine_code.MachineCode("k", "sm_90", 1, 0, 0, 0, 0, opcodes, b"")
    assert code.widths(machine_code.GLOBAL_LOADS) == {256: 1, 128: 1, 64: 3, 32: 2, 8: 4}
    assert list(code.widths(machine_code.GLOBAL_LOADS)) == [256, 128, 64, 32, 8]
    assert code.widths(machine_code.GLOBAL_STORES) == {16: 1}


def test_unknown_kernel_and_broken_cubin_are_named(cubin):
    log = LOG.replace("first", "shares")
    with pytest.raises(ValueError, match="has no kernel 'nothing'; it has: shares, second"):
        machine_code.read(cubin.code, log, "nothing")
    with pytest.raises(ValueError, match="the cubin has no kernel 'second'; it has: "):
        machine_code.read(cubin.code, log, "second")
    with pytest.raises(ValueError, match="has no kernel None; it has: shares, second"):
        machine_code.read(cubin.code, log)
    with pytest.raises(ValueError, match="nvdisasm cannot read 7 bytes"):
        machine_code.disassemble(b"nothing")


def test_arch_and_functions_are_read_from_the_cubin(cubin):
    arch, functions = machine_code.disassemble(cubin.code)
    assert arch == "sm_90" and set(functions) == {"local_array", "spills", "shares"}


@pytest.mark.parametrize("name", ["nvdisasm", "cuobjdump"])
def test_tools_of_the_wheels_run(name):
    for path in machine_code.tools(name):
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        assert done.returncode == 0 and name in done.stdout


@pytest.mark.parametrize(
    ("given", "meant"), [("h100", "sm_90a"), ("RTX 4090", "sm_89"), ("sm90", "sm_90a")]
)
def test_an_arch_that_is_none_is_answered_by_the_one_that_is_meant(given, meant):
    with pytest.raises(ValueError, match=f"allowed are sm_75, .*; did you mean `{meant}`"):
        machine_code.capability_of(given)


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    with pytest.raises(RuntimeError, match="objcopy is not installed: pip install nvidia-cuda-"):
        machine_code.tools("objcopy")


def test_a_second_disassembler_is_tried(cubin, tmp_path, monkeypatch):
    old = tmp_path / "nvdisasm"
    old.write_text("#!/bin/sh\necho 'Cannot decode architecture' >&2\nexit 1\n")
    old.chmod(0o755)
    newest = machine_code.tools("nvdisasm")[-1]
    monkeypatch.setattr(machine_code, "tools", lambda name: (str(old), newest))
    assert "shares" in machine_code.disassemble(cubin.code)[1]
    monkeypatch.setattr(machine_code, "tools", lambda name: (str(old),))
    with pytest.raises(ValueError, match="Cannot decode architecture For a newer arch: pip"):
        machine_code.disassemble(cubin.code)


def test_matrix_instructions_of_every_generation():
    opcodes = [
        "HMMA.16816.F32",
        "HGMMA.64x64x16.F32",
        "UTCHMMA.2CTA",
        "IMMA",
        "QMMA",
        "FFMA",
        "LDGSTS",
    ]
    code = machine_code.MachineCode("k", "sm_90", 1, 0, 0, 0, 0, dict.fromkeys(opcodes, 2), b"")
    assert code.matrix_instructions == 10
    assert code.matrix_units == ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "QMMA")
    assert code.count("HMMA", "IMMA") == 4
    assert code.count("HMMA") == 2 and code.count("LDG") == 0

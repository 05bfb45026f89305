"""Builds of Triton and of CUDA C++ kernels, compiled for archs and held to budgets."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton.language as tl

from nearlight.core.builds import check_budget, compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.launch import described_launches
from nearlight.core.machine_code import MachineCode
from nearlight.core.op import KernelBuild
from nearlight.core.triton import jit

ROW_SUM = Kernel(Path(__file__).parent / "kernels" / "row_sum.cu", "row_sum<__nv_bfloat16>")


@jit
def _row_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x * tl.sum(x))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_120"])
def test_a_cuda_kernel_is_compiled_for_an_arch_with_its_own_features(arch):
    build = KernelBuild(ROW_SUM, {}, {}, num_threads=256, shared_bytes=1024, max_registers=64)
    code = compile_build(build, arch)
    assert code.arch == arch and 0 < code.registers <= 64
    assert code.shared_bytes >= 1024 and code.count("LDG") > 0
    assert f".entry {code.name}(" in code.ptx and ".loc" in code.ptx
    assert check_budget(build, code) == []


def test_an_unknown_arch_is_refused_for_both_languages():
    for build in (KernelBuild(ROW_SUM, {}, {}), KernelBuild(_row_kernel, {}, {"N": 16})):
        with pytest.raises(ValueError, match="allowed are sm_75.*did you mean `sm_90a`"):
            compile_build(build, "SM_90")


def test_a_launch_on_meta_tensors_is_described():
    x = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
    out = torch.empty(64, device="meta")
    with described_launches(None) as builds:
        for _ in range(2):
            ROW_SUM[(64,), (32, 4), 256](out, x, 512, 2.0)
    assert builds == [KernelBuild(ROW_SUM, {}, {}, num_threads=128, shared_bytes=256)]
    with pytest.raises(ValueError, match="meta tensors hold no values"):
        ROW_SUM[(64,), (256,)](out, x, 512, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda out, x: (out, x, 512),
            r"takes 4 arguments \(float\* out, __nv_bfloat16\* x, .*got 3",
        ),
        (lambda out, x: (out, 5, 512, 2.0), "x is a pointer and takes a tensor or None; got int"),
        (lambda out, x: (out, x.float(), 512, 2.0), "x points to __nv_bfloat16 .*torch.float32"),
        (lambda out, x: (out, x, 512.0, 2.0), "num_columns is long long and takes an integer"),
        (lambda out, x: (out, x, x, 2.0), "num_columns is long long .*a tensor of torch.bfloat16"),
    ],
)
def test_a_launch_on_meta_tensors_that_does_not_fit_is_refused_with_its_line(change, message):
    x = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
    out = torch.empty(64, device="meta")
    place = r"row_sum.cu:7: row_sum<__nv_bfloat16>"
    with (
        described_launches(None) as builds,
        pytest.raises(TypeError, match=f"{place}.*{message}"),
    ):
        ROW_SUM[(64,), (256,)](*change(out, x))
    assert builds == []


def test_budgets():
    build = KernelBuild(_row_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": 16384}, 1)
    code = compile_build(build, "sm_80")
    assert code.spill_bytes > 0 and code.stack_bytes > 0
    strict = replace(build, max_registers=32, uses_tensor_cores=True)
    assert check_budget(strict, replace(code, shared_bytes=10**6)) == [
        f"_row_kernel on sm_80: {code.registers} registers per thread, allowed 32",
        f"_row_kernel on sm_80: {code.spill_store_bytes} bytes of spill stores and "
        f"{code.spill_load_bytes} of spill loads, allowed 0 together",
        "_row_kernel on sm_80: no matrix instruction, though the kernel is said to use tensor "
        "cores",
        "_row_kernel on sm_80: 1000000 bytes of shared memory, a block has 166912",
    ]
    assert check_budget(replace(build, max_spill_bytes=code.spill_bytes), code) == []


@pytest.mark.parametrize(
    ("num_threads", "registers", "bound", "violation"),
    [
        (256, 255, 0, ""),
        (257, 255, 0, "257 threads × 255 registers, more than an SM has"),
        (1024, 64, 1024, ""),
        (1025, 64, 0, "1025 threads, a block has 1024"),
        (256, 64, 128, "256 threads, __launch_bounds__ allows 128"),
        (0, 255, 0, ""),  # nothing is known of its launch
    ],
)
def test_a_block_that_can_never_be_launched_breaks_its_budget(
    num_threads, registers, bound, violation
):
    build = KernelBuild(ROW_SUM, {}, {}, num_threads=num_threads)
    code = MachineCode("k", "sm_90a", registers, 0, 0, 0, 0, {}, b"", num_threads=bound)
    name = "row_sum<__nv_bfloat16> on sm_90a"
    assert check_budget(build, code) == ([f"{name}: {violation}"] if violation else [])

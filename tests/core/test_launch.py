import pytest
import torch
import triton.language as tl

from nearlight.core import launch
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import described_launches, gpu_of_arch, launch_gpu, misfit
from nearlight.core.triton import compile_for, jit

META = torch.device("meta")


@jit
def _add_kernel(x_ptr, y_ptr, N, stride, factor, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr = True):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets * stride, offsets < N)
    if y_ptr is not None:
        x += tl.load(y_ptr + offsets, offsets < N) * factor
    tl.store(x_ptr + offsets * stride, x, offsets < N)


def test_launch_gpu_is_none_for_the_interpreter():
    assert launch_gpu(torch.device("cpu")) is None


def test_launch_gpu_of_a_card_the_table_lacks(monkeypatch):
    class Properties:
        name, multi_processor_count = "NVIDIA Thing 1", 77

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(launch, "_gpus", {})
    gpu = launch_gpu(torch.device("cuda", 0))
    assert (gpu.key, gpu.num_sms) == ("NVIDIA Thing 1", 77)
    assert gpu.l2_bytes == find_gpu("h200").l2_bytes


def test_gpu_of_an_arch():
    assert gpu_of_arch("sm_80").arch == "sm_80"
    assert gpu_of_arch("sm_90").arch == gpu_of_arch("sm_90a").arch == "sm_90a"
    assert gpu_of_arch("sm_87").key == "h200"  # as for a card that the table lacks


def test_described_as_triton_specialises():
    gpu = find_gpu("l4")
    x = torch.empty(48, dtype=torch.bfloat16, device=META)
    with described_launches(gpu) as builds:
        assert launch_gpu(META) is gpu
        _add_kernel[(3,)](x, x, 48, 1, 0.5, BLOCK=16, num_warps=2)
        _add_kernel[(3,)](x, x, 48, 1, 0.5, BLOCK=16, num_warps=2)  # the same: noted once
        _add_kernel[(3,)](x, None, 2**31 + 1, 48, 0.5, BLOCK=16, IS_WIDE=False, num_stages=2)
    first, second = builds
    assert first.kernel is _add_kernel and (first.num_warps, first.num_stages) == (2, 3)
    assert first.signature == {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32:16", "factor": "fp32"}
    assert first.constants == {"stride": 1, "BLOCK": 16}
    assert second.signature == {"x_ptr": "*bf16", "N": "i64", "stride": "i32:16", "factor": "fp32"}
    assert second.constants == {"y_ptr": None, "BLOCK": 16, "IS_WIDE": False}
    assert second.num_stages == 2
    assert compile_for(first, "sm_80").spill_bytes == 0


def test_arguments_that_are_not_specialised():
    @jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["second"])
    def _kernel(x_ptr, first, second):
        tl.store(x_ptr, first + second)

    with described_launches(None) as builds:
        _kernel[(1,)](torch.empty(1, device=META), 1, 16)
    assert builds[0].signature == {"x_ptr": "*fp32", "first": "i32", "second": "i32"}


def test_meta_tensors_outside_are_refused():
    with pytest.raises(ValueError, match="meta tensors inside `described_launches`"):
        launch_gpu(META)


def test_the_grid_of_each_launch_is_described():
    x = torch.empty(48, device=META)
    with described_launches(None) as builds:
        _add_kernel[(3, 1 << 17)](x, x, 48, 1, 0.5, BLOCK=16)
        _add_kernel[lambda given: (given["N"] // given["BLOCK"] + given["IS_WIDE"],)](
            x, x, 48, 1, 0.5, BLOCK=16
        )
    assert builds.grids == [("_add_kernel", (3, 1 << 17)), ("_add_kernel", (4,))]
    assert len(builds) == 1  # one kernel, whatever its grid


def test_a_grid_that_no_gpu_takes():
    assert misfit((2**31 - 1, 65_535, 65_535)) == misfit((0,)) == ""
    assert misfit((1, 65_536)) == "grid (1, 65536): axis 1 of a launch takes 0 to 65535"
    assert misfit((2**31,)).endswith("axis 0 of a launch takes 0 to 2147483647")
    assert misfit((1, 1, 1, 1)).endswith("allowed are one to three sizes")

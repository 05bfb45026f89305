import subprocess
import sys
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch

from nearlight.core import hardware
from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import (
    GPUS,
    PIPES,
    Chip,
    detect_gpu,
    find_gpu,
    gpu_from_device_name,
    require_gpu,
)

ALL = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())

# Tensor operations per SM and clock in half precision with fp32 accumulation, dense.
HALF_FLOPS_PER_SM_AND_CLOCK = {
    "sm_75": {1024},
    "sm_80": {2048},
    "sm_86": {512, 1024},  # GeForce and some boards at half rate
    "sm_89": {512, 1024},
    "sm_90a": {4096},
    "sm_100a": {8192},
    "sm_120a": {512, 1024},
}


def test_every_gpu_of_the_design_is_there():
    wanted = (
        "t4 a10g l4 l40s a100-40gb a100-80gb h100-sxm h100-pcie h200 b200 gb200 rtx-3090 "
        "rtx-4090 rtx-5090 rtx-pro-6000"
    )
    assert set(wanted.split()) <= set(GPUS)


@ALL
def test_fp32_rate_follows_from_sms_and_clock(gpu):
    lanes = gpu.num_sms * gpu.fp32_lanes_per_sm
    assert lanes * 2 * gpu.boost_mhz * 1e6 == pytest.approx(
        gpu.peak_tflops("fp32") * 1e12, rel=0.05
    )


# The H20's tensor cores are throttled for export, by no whole factor.
@pytest.mark.parametrize(
    "gpu", [gpu for gpu in GPUS.values() if gpu.key != "h20"], ids=lambda gpu: gpu.key
)
def test_half_rate_follows_from_sms_and_clock(gpu):
    # No published tensor clock is above the boost clock, and none is 15% below it; a sparse
    # rate in the table would be off by 2.
    half = gpu.peak_tflops("fp16") * 1e12 / (gpu.num_sms * gpu.boost_mhz * 1e6)
    assert any(0.85 <= half / rate <= 1.01 for rate in HALF_FLOPS_PER_SM_AND_CLOCK[gpu.arch]), half


@ALL
def test_pipes_are_in_proportion(gpu):
    peaks = gpu.peaks_tflops
    assert set(peaks) <= set(PIPES)
    assert all(rate > 0 for rate in peaks.values())
    assert peaks["fp64"] <= peaks["fp32"]
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.02)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if "fp4" in peaks:
        assert peaks["fp4"] >= 2 * peaks["fp8"] * 0.99
    assert peaks["int8"] >= 2 * peaks["fp16"] * 0.99


@ALL
def test_pipes_exist_only_where_the_architecture_has_them(gpu):
    assert ("bf16" in gpu.peaks_tflops) == (gpu.compute_capability >= (8, 0))
    assert ("tf32" in gpu.peaks_tflops) == (gpu.compute_capability >= (8, 0))
    assert ("fp8" in gpu.peaks_tflops) == (gpu.compute_capability >= (8, 9))
    assert ("fp4" in gpu.peaks_tflops) == (gpu.compute_capability >= (10, 0))


@ALL
def test_sizes_are_sane(gpu):
    major, minor = gpu.compute_capability
    assert gpu.arch.rstrip("a") == f"sm_{major}{minor}"
    assert 300 <= gpu.memory_gbps <= 8000
    assert 14 * 2**30 <= gpu.memory_bytes <= 192 * 2**30
    assert 4 * 2**20 <= gpu.l2_bytes <= 128 * 2**20
    assert gpu.shared_bytes_per_block <= gpu.shared_bytes_per_sm
    assert gpu.registers_per_sm == 65536
    assert gpu.pcie_gbps in (32, 64, 128)
    assert 0 <= gpu.nvlink_gbps <= 1800
    assert gpu.num_tensor_cores == gpu.num_sms * (8 if gpu.arch == "sm_75" else 4)


@ALL
def test_every_value_has_a_source(gpu):
    values = {field.name for field in fields(gpu)} - {"key", "name", "device_names", "sources"}
    values |= {f"peaks_tflops.{pipe}" for pipe in gpu.peaks_tflops}
    assert values - {"peaks_tflops"} == set(gpu.sources)
    assert all(len(source) > 8 and "://" not in source for source in gpu.sources.values())


def test_published_numbers():
    h200 = GPUS["h200"]
    assert h200.peak_tflops("bf16") == pytest.approx(1979 / 2, rel=1e-3)
    assert h200.memory_gbps == 4800
    assert h200.arch == "sm_90a"
    assert h200.memory_bytes / 2**30 == pytest.approx(140.4, abs=0.1)
    assert GPUS["l4"].peak_tflops("fp8") == pytest.approx(485 / 2)
    assert GPUS["rtx-4090"].peak_tflops("bf16") == 165.2
    assert GPUS["t4"].peak_tflops("fp16") == 65


def test_missing_pipe_names_the_pipes_there_are():
    with pytest.raises(ValueError, match=r"t4 has no 'bf16' pipe: it has fp64, fp32, fp16, int8"):
        GPUS["t4"].peak_tflops("bf16")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("h100_pcie", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX A6000", "a6000"),
        ("RTX PRO 6000", "rtx-pro-6000"),
    ],
)
def test_find_gpu(name, key):
    assert find_gpu(name) is GPUS[key]


@ALL
def test_find_gpu_knows_all_of_its_own_names(gpu):
    for name in (gpu.key, gpu.key.upper(), gpu.name, *gpu.device_names):
        assert find_gpu(name) is gpu


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "",
    ],
)
def test_another_variant_is_never_taken_for_its_brother(name):
    with pytest.raises(ValueError, match="unknown GPU"):
        find_gpu(name)


def test_nearest_names_are_offered():
    with pytest.raises(ValueError, match=r"unknown GPU 'h10': did you mean .*h100-sxm"):
        find_gpu("h10")
    with pytest.raises(ValueError, match=r"not in the table.*did you mean .*rtx-4090"):
        gpu_from_device_name("NVIDIA GeForce RTX 4090 Laptop GPU")


def _imagine(monkeypatch, name, total_memory):
    properties = SimpleNamespace(name=name, total_memory=total_memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_detect_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_gpu() is None
    with pytest.raises(MissingPart, match=r"^race measures a GPU .*none that torch sees; walk$"):
        require_gpu("race", "walk")
    _imagine(monkeypatch, "NVIDIA H200", 143156 * 2**20)
    assert detect_gpu() is require_gpu("race", "walk") is GPUS["h200"]
    _imagine(monkeypatch, "NVIDIA H200", 35 * 2**30)
    with pytest.raises(ValueError, match=r"35\.0 GiB where h200 has 140\.4.*--gpu NAME"):
        detect_gpu()
    _imagine(monkeypatch, "NVIDIA H300", 35 * 2**30)
    with pytest.raises(BadInput, match=r"not in the table; --gpu NAME predicts.*h200"):
        detect_gpu()


def test_a_row_is_a_value():
    gpu = GPUS["h200"]
    assert hash(gpu) == hash(replace(gpu)) and gpu == replace(gpu)
    assert asdict(gpu)["peaks_tflops"]["bf16"] == 989.4
    assert isinstance(gpu, Chip)


def test_the_table_needs_no_torch():
    code = "import sys; from nearlight.core.hardware import find_gpu; find_gpu('h200')"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ceilings_are_reached_from_here():
    assert hardware.ceilings(GPUS["h200"]).validated
    assert not hardware.ceilings(GPUS["l4"]).validated

"""The table of GPUs: dense peaks per pipe, memory, caches, clocks and links, each with a source.

Rates are dense; the 2:4-sparse rates that datasheets like to print are twice as high and never
used. Tensor rates of fp16, bf16 and fp8 are those with fp32 accumulation, as training needs it:
GeForce boards run that at half the rate of fp16 accumulation. `fp64` is the faster of the vector
and the tensor rate. Torch is only needed by `detect_gpu`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from nearlight.core.errors import BadInput, MissingPart

if TYPE_CHECKING:
    from nearlight.core.ceilings import Ceilings

PIPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")

_MIB = 1 << 20
_CHIP_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_DRIVER = "board memory as nvidia-smi reports it (in-band ECC of GDDR boards taken off)"


@dataclass(frozen=True)
class Chip:
    """What all GPUs of one compute capability share.

    Attributes:
        arch: machine code to compile for, with the architecture's own instructions ("sm_90a").
        compute_capability: major and minor.
        fp32_lanes_per_sm: fp32 multiply-adds per SM and clock.
        tensor_cores_per_sm: tensor cores of an SM.
        shared_bytes_per_sm: shared memory of an SM.
        shared_bytes_per_block: shared memory that one block may ask for.
        registers_per_sm: 32-bit registers of an SM.
    """

    arch: str
    compute_capability: tuple[int, int]
    fp32_lanes_per_sm: int
    tensor_cores_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    registers_per_sm: int = 65536


@dataclass(frozen=True, kw_only=True)
class Gpu(Chip):
    """One GPU of the table.

    Attributes:
        key: how the command line calls it ("h100-sxm").
        name: product name.
        num_sms: streaming multiprocessors.
        boost_mhz: highest SM clock of the fp32 rate.
        peaks_tflops: dense 10¹² operations per second by pipe; a pipe it lacks is absent.
        memory_bytes: device memory that the driver shows.
        memory_gbps: 10⁹ bytes per second of device memory.
        l2_bytes: L2 cache.
        nvlink_gbps: NVLink, 10⁹ bytes per second, both directions together; 0 for none.
        pcie_gbps: PCIe, 10⁹ bytes per second, both directions together.
        sources: where each value comes from, by its name ("memory_gbps", "peaks_tflops.bf16").
        device_names: what `torch.cuda.get_device_name` answers on it.
    """

    key: str
    name: str
    num_sms: int
    boost_mhz: int
    peaks_tflops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_gbps: float
    l2_bytes: int
    nvlink_gbps: float
    pcie_gbps: float
    sources: Mapping[str, str] = field(hash=False, repr=False)
    device_names: tuple[str, ...]

    @property
    def num_tensor_cores(self) -> int:
        """Tensor cores of the whole GPU."""
        return self.num_sms * self.tensor_cores_per_sm

    def peak_tflops(self, pipe: str) -> float:
        """Return the dense peak of a pipe; raise BadInput where the GPU has no such pipe."""
        if pipe not in self.peaks_tflops:
            has = ", ".join(self.peaks_tflops)
            raise BadInput(f"{self.key} has no {pipe!r} pipe: it has {has}")
        return self.peaks_tflops[pipe]


_SM75 = Chip("sm_75", (7, 5), 64, 8, 65536, 65536)
_SM80 = Chip("sm_80", (8, 0), 64, 4, 167936, 166912)
_SM86 = Chip("sm_86", (8, 6), 128, 4, 102400, 101376)
_SM89 = Chip("sm_89", (8, 9), 128, 4, 102400, 101376)
_SM90 = Chip("sm_90a", (9, 0), 128, 4, 233472, 232448)
_SM100 = Chip("sm_100a", (10, 0), 128, 4, 233472, 232448)
_SM120 = Chip("sm_120a", (12, 0), 128, 4, 102400, 101376)


def _gpu(
    key: str,
    name: str,
    chip: Chip,
    *,
    document: str,
    peaks: Mapping[str, float],
    memory_mib: int,
    l2_mib: float,
    device_names: tuple[str, ...],
    other_sources: Mapping[str, str] = MappingProxyType({}),
    nvlink_gbps: float = 0.0,
    **values: float,
) -> Gpu:
    numbers = ("num_sms", "boost_mhz", "memory_gbps", "l2_bytes", "nvlink_gbps", "pcie_gbps")
    sources = dict.fromkeys(numbers, document)
    sources |= {f"peaks_tflops.{pipe}": document for pipe in peaks}
    sources |= {"memory_bytes": _DRIVER} | {one.name: _CHIP_GUIDE for one in fields(chip)}
    unknown = other_sources.keys() - sources.keys()
    assert not unknown, f"{key}: a source for values it does not have: {unknown}"
    return Gpu(
        key=key,
        name=name,
        **asdict(chip),
        num_sms=int(values["num_sms"]),
        boost_mhz=int(values["boost_mhz"]),
        peaks_tflops={pipe: peaks[pipe] for pipe in PIPES if pipe in peaks},
        memory_bytes=memory_mib * _MIB,
        memory_gbps=values["memory_gbps"],
        l2_bytes=int(l2_mib * _MIB),
        nvlink_gbps=nvlink_gbps,
        pcie_gbps=values["pcie_gbps"],
        sources={**sources, **other_sources},
        device_names=device_names,
    )


def _tensor(half: float, *, tf32: float, **others: float) -> dict[str, float]:
    """Peaks where fp16 and bf16 run at one rate, as on everything since Ampere."""
    return {"fp16": half, "bf16": half, "tf32": tf32, **others}


_A100 = _tensor(312.0, tf32=156.0, fp64=19.5, fp32=19.5, int8=624.0)
_H100 = _tensor(989.4, tf32=494.7, fp64=66.9, fp32=66.9, fp8=1978.9, int8=1978.9)
_FP64_32ND = {"peaks_tflops.fp64": "1/32 of fp32 by the arithmetic throughput table of the guide"}
_FP64_64TH = {"peaks_tflops.fp64": "1/64 of fp32 by the arithmetic throughput table of the guide"}
_REPORTED = "device properties as CUDA reports them"
_BOARD = dict.fromkeys(("num_sms", "boost_mhz", "l2_bytes"), _REPORTED)
_ADA = "NVIDIA Ada GPU Architecture whitepaper"

# fmt: off
_TABLE = (
    _gpu(
        "t4", "NVIDIA T4", _SM75, num_sms=40, boost_mhz=1590,
        peaks={"fp64": 0.254, "fp32": 8.1, "fp16": 65.0, "int8": 130.0},
        memory_mib=15360, memory_gbps=320, l2_mib=4, pcie_gbps=32, device_names=("Tesla T4",),
        document="NVIDIA T4 datasheet; Turing Architecture whitepaper, appendix Tesla T4",
        other_sources=_FP64_32ND,
    ),
    _gpu(
        "a10g", "NVIDIA A10G", _SM86, num_sms=80, boost_mhz=1710,
        peaks=_tensor(70.0, tf32=35.0, fp64=0.547, fp32=35.0, int8=140.0),
        memory_mib=23028, memory_gbps=600, l2_mib=6, pcie_gbps=64, device_names=("NVIDIA A10G",),
        document="NVIDIA A10G datasheet (AWS)", other_sources=_FP64_64TH | _BOARD,
    ),
    _gpu(
        "a6000", "NVIDIA RTX A6000", _SM86, num_sms=84, boost_mhz=1800,
        peaks=_tensor(154.8, tf32=77.4, fp64=0.605, fp32=38.7, int8=309.7),
        memory_mib=49140, memory_gbps=768, l2_mib=6, nvlink_gbps=112.5, pcie_gbps=64,
        device_names=("NVIDIA RTX A6000",),
        document="NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix RTX A6000",
        other_sources=_FP64_64TH,
    ),
    _gpu(
        "l4", "NVIDIA L4", _SM89, num_sms=58, boost_mhz=2040,
        peaks=_tensor(121.0, tf32=60.0, fp64=0.473, fp32=30.3, fp8=242.5, int8=242.5),
        memory_mib=23034, memory_gbps=300, l2_mib=48, pcie_gbps=64, device_names=("NVIDIA L4",),
        document="NVIDIA L4 datasheet (tensor rates halved: printed with sparsity); " + _ADA,
        other_sources=_FP64_64TH,
    ),
    _gpu(
        "l40", "NVIDIA L40", _SM89, num_sms=142, boost_mhz=2490,
        peaks=_tensor(181.05, tf32=90.5, fp64=1.41, fp32=90.5, fp8=362.0, int8=362.0),
        memory_mib=46068, memory_gbps=864, l2_mib=96, pcie_gbps=64, device_names=("NVIDIA L40",),
        document="NVIDIA L40 datasheet; " + _ADA, other_sources=_FP64_64TH,
    ),
    _gpu(
        "l40s", "NVIDIA L40S", _SM89, num_sms=142, boost_mhz=2520,
        peaks=_tensor(362.05, tf32=183.0, fp64=1.43, fp32=91.6, fp8=733.0, int8=733.0),
        memory_mib=46068, memory_gbps=864, l2_mib=96, pcie_gbps=64, device_names=("NVIDIA L40S",),
        document="NVIDIA L40S datasheet; " + _ADA, other_sources=_FP64_64TH,
    ),
    _gpu(
        "a100-40gb", "NVIDIA A100 40GB", _SM80, num_sms=108, boost_mhz=1410, peaks=_A100,
        memory_mib=40960, memory_gbps=1555, l2_mib=40, nvlink_gbps=600, pcie_gbps=64,
        device_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        document="NVIDIA A100 datasheet; A100 Tensor Core GPU Architecture whitepaper",
    ),
    _gpu(
        "a100-80gb", "NVIDIA A100 80GB SXM", _SM80, num_sms=108, boost_mhz=1410, peaks=_A100,
        memory_mib=81920, memory_gbps=2039, l2_mib=40, nvlink_gbps=600, pcie_gbps=64,
        device_names=("NVIDIA A100-SXM4-80GB",),
        document="NVIDIA A100 80GB datasheet; A100 Tensor Core GPU Architecture whitepaper",
    ),
    _gpu(
        "a100-80gb-pcie", "NVIDIA A100 80GB PCIe", _SM80, num_sms=108, boost_mhz=1410, peaks=_A100,
        memory_mib=81920, memory_gbps=1935, l2_mib=40, nvlink_gbps=600, pcie_gbps=64,
        device_names=("NVIDIA A100 80GB PCIe",),
        document="NVIDIA A100 80GB datasheet; A100 Tensor Core GPU Architecture whitepaper",
    ),
    _gpu(
        "h100-sxm", "NVIDIA H100 SXM", _SM90, num_sms=132, boost_mhz=1980, peaks=_H100,
        memory_mib=81559, memory_gbps=3352, l2_mib=50, nvlink_gbps=900, pcie_gbps=128,
        device_names=("NVIDIA H100 80GB HBM3",),
        document="NVIDIA H100 datasheet (tensor rates halved: printed with sparsity); H100 Tensor "
                 "Core GPU Architecture whitepaper",
    ),
    _gpu(
        "h100-pcie", "NVIDIA H100 PCIe", _SM90, num_sms=114, boost_mhz=1755,
        peaks=_tensor(756.0, tf32=378.0, fp64=51.2, fp32=51.2, fp8=1513.0, int8=1513.0),
        memory_mib=81559, memory_gbps=2039, l2_mib=50, nvlink_gbps=600, pcie_gbps=128,
        device_names=("NVIDIA H100 PCIe",),
        document="NVIDIA H100 PCIe product brief and datasheet (tensor rates halved: printed with "
                 "sparsity)",
    ),
    _gpu(
        "h20", "NVIDIA H20", _SM90, num_sms=78, boost_mhz=1980,
        peaks=_tensor(148.0, tf32=74.0, fp64=1.0, fp32=39.5, fp8=296.0, int8=296.0),
        memory_mib=97871, memory_gbps=4000, l2_mib=60, nvlink_gbps=900, pcie_gbps=128,
        device_names=("NVIDIA H20",), document="NVIDIA H20 datasheet",
        other_sources=_BOARD | {
            "peaks_tflops.fp32": "SMs × lanes × 2 × clock; the 44 of the datasheet would need "
                                 "2.2 GHz, above the board's highest clock",
        },
    ),
    _gpu(
        "h200", "NVIDIA H200", _SM90, num_sms=132, boost_mhz=1980, peaks=_H100,
        memory_mib=143771, memory_gbps=4800, l2_mib=60, nvlink_gbps=900, pcie_gbps=128,
        device_names=("NVIDIA H200",), other_sources=_BOARD,
        document="NVIDIA H200 datasheet (tensor rates halved: printed with sparsity; digits of "
                 "the H100 whitepaper, same compute)",
    ),
    _gpu(
        "b200", "NVIDIA B200", _SM100, num_sms=148, boost_mhz=1965,
        peaks=_tensor(2250.0, tf32=1125.0, fp64=37.0, fp32=75.0, fp8=4500.0, int8=4500.0,
                      fp4=9000.0),
        memory_mib=183359, memory_gbps=8000, l2_mib=126.5, nvlink_gbps=1800, pcie_gbps=128,
        device_names=("NVIDIA B200",), other_sources=_BOARD,
        document="NVIDIA HGX B200 and DGX B200 datasheets, an eighth of the system, dense",
    ),
    _gpu(
        "gb200", "NVIDIA GB200 (one GPU)", _SM100, num_sms=152, boost_mhz=2062,
        peaks=_tensor(2500.0, tf32=1250.0, fp64=40.0, fp32=80.0, fp8=5000.0, int8=5000.0,
                      fp4=10000.0),
        memory_mib=189471, memory_gbps=8000, l2_mib=126.5, nvlink_gbps=1800, pcie_gbps=128,
        device_names=("NVIDIA GB200",), other_sources=_BOARD,
        document="NVIDIA GB200 NVL72 datasheet, half a superchip, dense",
    ),
    _gpu(
        "rtx-3090", "NVIDIA GeForce RTX 3090", _SM86, num_sms=82, boost_mhz=1695,
        peaks=_tensor(71.2, tf32=35.6, fp64=0.556, fp32=35.6, int8=284.7),
        memory_mib=24576, memory_gbps=936, l2_mib=6, nvlink_gbps=112.5, pcie_gbps=64,
        device_names=("NVIDIA GeForce RTX 3090",),
        document="NVIDIA Ampere GA102 GPU Architecture whitepaper, RTX 3090",
        other_sources=_FP64_64TH,
    ),
    _gpu(
        "rtx-4090", "NVIDIA GeForce RTX 4090", _SM89, num_sms=128, boost_mhz=2520,
        peaks=_tensor(165.2, tf32=82.6, fp64=1.29, fp32=82.6, fp8=330.3, int8=660.6),
        memory_mib=24564, memory_gbps=1008, l2_mib=72, pcie_gbps=64,
        device_names=("NVIDIA GeForce RTX 4090",), document=_ADA + ", RTX 4090",
        other_sources=_FP64_64TH,
    ),
    _gpu(
        "rtx-5090", "NVIDIA GeForce RTX 5090", _SM120, num_sms=170, boost_mhz=2407,
        peaks=_tensor(209.5, tf32=104.8, fp64=1.64, fp32=104.8, fp8=419.0, int8=838.0, fp4=1676.0),
        memory_mib=32607, memory_gbps=1792, l2_mib=96, pcie_gbps=128,
        device_names=("NVIDIA GeForce RTX 5090",),
        document="NVIDIA RTX Blackwell GPU Architecture whitepaper, RTX 5090",
        other_sources=_FP64_64TH,
    ),
    _gpu(
        "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation", _SM120, num_sms=188,
        boost_mhz=2617,
        peaks=_tensor(503.8, tf32=251.9, fp64=1.97, fp32=126.0, fp8=1007.6, int8=1007.6,
                      fp4=2015.2),
        memory_mib=97887, memory_gbps=1792, l2_mib=128, pcie_gbps=128,
        device_names=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        document="NVIDIA RTX Blackwell PRO GPU Architecture whitepaper, RTX PRO 6000",
        other_sources=_FP64_64TH,
    ),
)
# fmt: on

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.key: gpu for gpu in _TABLE})

# What people write where the name leaves something open, beside keys, names and device names.
_SPELLINGS = {
    "a100": "a100-80gb",
    "a100 sxm": "a100-80gb",
    "a100 pcie": "a100-80gb-pcie",
    "rtx a6000": "a6000",
    "h100": "h100-sxm",
    "h100 sxm5": "h100-sxm",
    "h100 80gb": "h100-sxm",
    "h200 sxm": "h200",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "rtx pro 6000 blackwell": "rtx-pro-6000",
}
_NOISE = {"nvidia", "tesla", "geforce", "gpu", "tensor", "core"}


def _squeeze(name: str) -> str:
    """Return the letters and digits that tell one GPU from another."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _NOISE)


_BY_SPELLING = {_squeeze(spelling): key for spelling, key in _SPELLINGS.items()} | {
    _squeeze(name): gpu.key for gpu in _TABLE for name in (gpu.key, gpu.name, *gpu.device_names)
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a key, a product name or a common spelling means.

    "A100" is taken as the 80 GB SXM board and "H100" as the SXM board. A name is never matched
    in part: a laptop or MIG variant is not its big brother.

    Args:
        name: "h100-sxm", "H100", "NVIDIA H100 80GB HBM3", "rtx 4090", ...

    Raises:
        BadInput: the table has no such GPU; the message offers the nearest keys.

    Example:
        >>> find_gpu("NVIDIA A100-SXM4-80GB").key
        'a100-80gb'
    """
    squeezed = _squeeze(name)
    if squeezed in _BY_SPELLING:
        return GPUS[_BY_SPELLING[squeezed]]
    close = difflib.get_close_matches(squeezed, _BY_SPELLING, n=3, cutoff=0.5)
    nearest = list(dict.fromkeys(_BY_SPELLING[spelling] for spelling in close))
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise BadInput(f"unknown GPU {name!r}: {hint}known are {', '.join(GPUS)}")


def gpu_from_device_name(name: str) -> Gpu:
    """Return the GPU that the driver calls `name`; BadInput with the nearest keys if none."""
    try:
        return find_gpu(name)
    except BadInput as error:
        raise BadInput(f"GPU not in the table; --gpu NAME predicts: {error}") from None


def detect_gpu(device: int | None = None) -> Gpu | None:
    """Return the table's row of a CUDA device of this machine, or None without a GPU.

    Args:
        device: index; the current device by default.

    Raises:
        BadInput: the GPU has no row in the table, or another memory size (a MIG or vGPU slice).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = gpu_from_device_name(properties.name)
    if abs(properties.total_memory / gpu.memory_bytes - 1) > 0.1:
        raise BadInput(
            f"{properties.name} shows {properties.total_memory / 2**30:.1f} GiB where {gpu.key} "
            f"has {gpu.memory_bytes / 2**30:.1f}: a slice has no row; --gpu NAME predicts"
        )
    return gpu


def require_gpu(verb: str, instead: str) -> Gpu:
    """Return this machine's GPU; MissingPart says who measures it, and what runs `instead`."""
    if (gpu := detect_gpu()) is None:
        none = f"{verb} measures a GPU and this machine has none that torch sees"
        raise MissingPart(f"{none}; {instead}")
    return gpu


def ceilings(gpu: Gpu) -> Ceilings:
    """Return what `gpu` was measured to reach, or the H200's fractions carried over to it."""
    from nearlight.core.ceilings import load  # the table does not need it

    return load(gpu)

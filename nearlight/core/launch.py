"""Launches as they would be on a GPU: for which one, and described without running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from nearlight.core.hardware import GPUS, Gpu, find_gpu, gpu_from_device_name
from nearlight.core.op import KernelBuild

# Where the table lacks a GPU, a launch rule takes this one's numbers.
_STAND_IN = "h200"
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
# Launch options that make another kernel.
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
# Programs along each axis of a grid, at most.
MAX_GRID = (2**31 - 1, 65_535, 65_535)
_gpus: dict[torch.device, Gpu | None] = {}


class Described(list[KernelBuild]):
    """The builds of launches, each once, in order; `grids` has each launch's kernel and grid."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[tuple[str, tuple[int, ...]]] = []


_described: ContextVar[tuple[Gpu | None, Described] | None] = ContextVar("described", default=None)


def launch_gpu(device: torch.device) -> Gpu | None:
    """Return the GPU whose numbers a launch rule may use; None for CPU tensors (interpreted).

    A GPU that the table lacks, or a slice of one, gets the H200's row with its own number of SMs:
    a launch rule needs no more, and nothing is judged by it. Meta tensors get the GPU of
    `described_launches`.
    """
    try:
        return _gpus[device]  # as fast as it gets: this is paid by every call of an op
    except KeyError:
        if device.type == "meta":
            return _description()[0]
    gpu = _gpus[device] = _gpu_of_device(device) if device.type == "cuda" else None
    return gpu


@contextmanager
def launched_as_on(gpu: Gpu) -> Iterator[None]:
    """Interpret CPU tensors in the tiles of a GPU inside the block, and not in few large ones."""
    cpu = torch.device("cpu")
    before, _gpus[cpu] = _gpus.get(cpu), gpu
    try:
        yield
    finally:
        _gpus[cpu] = before


def _gpu_of_device(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    try:
        gpu = gpu_from_device_name(properties.name)
    except ValueError:
        gpu = replace(find_gpu(_STAND_IN), key=properties.name)  # no row of the table's is its own
    return replace(gpu, num_sms=properties.multi_processor_count)


def gpu_of_arch(arch: str) -> Gpu:
    """Return the first GPU of the table with this arch ("sm_90" or "sm_90a")."""
    matching = (gpu for gpu in GPUS.values() if gpu.arch.rstrip("a") == arch.rstrip("af"))
    return next(matching, find_gpu(_STAND_IN))


@contextmanager
def described_launches(gpu: Gpu | None) -> Iterator[Described]:
    """Describe the launches on meta tensors inside the block instead of running them.

    So what is compiled for an arch is what the launcher of an op launches there, tiles included.

    Args:
        gpu: what `launch_gpu` answers; None for the launches of the interpreter.

    Returns:
        The builds, each once, in order; complete when the block ends. Budgets are the default
        ones.
    """
    builds = Described()
    token = _described.set((gpu, builds))
    try:
        yield builds
    finally:
        _described.reset(token)


def describe(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any = None) -> None:
    """Note a launch as Triton would specialise it: constants, None, ones and multiples of 16."""
    builds = _description()[1]
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    if callable(grid):
        grid = grid({p.name: p.default for p in kernel.params if p.has_default} | given)
    if grid is not None:
        builds.grids.append((kernel.__name__, tuple(map(int, grid))))
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        if parameter.name not in given:
            continue  # has a default, which the build takes, too
        value = given[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            constants[parameter.name] = value
        else:
            is_aligned = not (
                parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            )
            signature[parameter.name] = _type(value, is_aligned)
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    build = KernelBuild(kernel, signature, constants, **options)
    if build not in builds:
        builds.append(build)


def describe_cuda(kernel: Any, grid: tuple[int, ...], num_threads: int, shared_bytes: int) -> None:
    """Note a launch of a CUDA C++ kernel: its grid, its block and its dynamic shared memory."""
    build = KernelBuild(kernel, {}, {}, num_threads=num_threads, shared_bytes=shared_bytes)
    builds = _description()[1]
    builds.grids.append((kernel.name, grid))
    if build not in builds:
        builds.append(build)


def misfit(grid: tuple[int, ...]) -> str:
    """Say how a grid is one that no GPU takes, or return ""."""
    if not 1 <= len(grid) <= 3:
        return f"grid {grid}: allowed are one to three sizes"
    for axis, (size, limit) in enumerate(zip(grid, MAX_GRID, strict=False)):
        if not 0 <= size <= limit:
            return f"grid {grid}: axis {axis} of a launch takes 0 to {limit}"
    return ""


def is_describing() -> bool:
    """Return whether launches on meta tensors are described here and now."""
    return _described.get() is not None


def _description() -> tuple[Gpu | None, Described]:
    described = _described.get()
    if described is None:
        raise ValueError(
            "meta tensors hold no values to launch a kernel on: allowed are CUDA and CPU tensors, "
            "and meta tensors inside `described_launches`"
        )
    return described


def _type(value: Any, is_aligned: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        size = "i32" if -(2**31) <= value < 2**31 else "i64"
        return f"{size}:16" if is_aligned and value % 16 == 0 else size
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel argument is a {type(value).__name__}: allowed are tensors, numbers")

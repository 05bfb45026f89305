"""What row-wise reductions share: tensors as rows, launch rules, checks, sums over programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu, find_gpu, gpu_from_device_name
from nearlight.core.op import KernelBuild
from nearlight.core.triton import jit

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_WIDTH = 262_144
# A row up to here is held in registers (with one sum beside it); a wider one is read twice.
MAX_BLOCK = 16384
# Up to here the parameters of a row stay in registers while a program walks over its rows.
MAX_HELD_BLOCK = 8192
# Columns of a program that adds partial sums: short of programs, not of work, it takes few.
COLUMN_SUM_BLOCK = 32


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as (rows, N) with unit column stride; a copy only where no view does.

    Sums and means run along the last dimension; a row whose elements lie apart in memory costs a
    whole sector per element in a kernel, more than the copy does.
    """
    width = tensor.shape[-1]
    if width > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, width)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over `dtype` run in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def triton_accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return `accumulator(dtype)` as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@dataclass(frozen=True)
class RowConfig:
    """How a row-wise kernel is launched.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile, a power of two; fewer than the row has where it is too wide.
        num_warps: warps of a program.
        num_stages: depth of the loads' pipeline; 1 for none.
        num_programs: programs over the rows; a grid has this many per block of columns.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int


def forward_config(shape: tuple[int, int], gpu: Gpu | None) -> RowConfig:
    """Choose the launch of a pass that reads (rows, N) and writes as much.

    One program per tile; `gpu` is None for the interpreter, where a program costs the same
    whatever its tile.
    """
    rows, width = shape
    if width > MAX_BLOCK:
        # Few large programs: of the rows in flight more stays in L2 for the second read. Two of 16
        # warps with pipelined blocks of 8192 took 1.11 times as long (4096 × 65536, H200).
        return RowConfig(1, MAX_BLOCK, 32 if gpu else 4, 1, rows)
    block_n = triton.next_power_of_2(width)
    block_m = _block_m(rows, block_n, gpu)
    # 32 elements per thread: four 16-byte loads of bf16 in flight before the first use.
    num_warps = min(32, max(1, block_m * block_n // 1024))
    return RowConfig(block_m, block_n, num_warps, 1, triton.cdiv(rows, block_m))


def backward_config(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, num_sums: int = 1
) -> RowConfig:
    """Choose the launch of a pass over (rows, N) that sums over the rows on its way.

    Persistent programs: each walks over every `num_programs`-th tile with its sums in registers.

    Args:
        shape: rows and their width.
        dtype: dtype of the rows.
        gpu: None for the interpreter.
        num_sums: how many sums over the rows a program holds.
    """
    rows, width = shape
    is_wide = width > MAX_BLOCK // num_sums
    block_n = 2048 if is_wide else triton.next_power_of_2(width)
    if gpu is None:
        block_n = MAX_BLOCK // num_sums if is_wide else block_n
        # NumPy adds the rows of a tile one after the other: more of them lose digits of the sum.
        block_m = min(64, 2**18 // block_n, triton.next_power_of_2(rows))
        tiles = triton.cdiv(rows, block_m)
        return RowConfig(block_m, block_n, 4, 1, min(tiles, max(2, isqrt(32 * tiles))))
    block_m = 1 if is_wide else _block_m(rows, block_n, gpu)
    tiles = triton.cdiv(rows, block_m)
    num_warps = min(32, max(1, block_m * block_n // 512))
    # Rows, upstream gradients (fp32 at most) and, where they are not held, the parameters.
    stage_bytes = block_m * block_n * (dtype.itemsize + max(dtype.itemsize, 4))
    stage_bytes += block_n * 4 * (block_n > MAX_HELD_BLOCK)
    free_bytes = gpu.shared_bytes_per_block - 4096
    num_stages = 1 + min(2, free_bytes // stage_bytes)
    if is_wide:
        programs = 8 * gpu.num_sms // triton.cdiv(width, block_n)
    else:  # as many as the registers of an SM hold
        programs = max(1, (24 if num_sums == 1 else 16) // num_warps) * gpu.num_sms
    if dtype.itemsize >= 4:
        # A sum of n numbers one by one errs as √n: a program's tiles and the programs, of which
        # `column_sums` takes 32 at once, share the number fairly.
        programs = max(programs, isqrt(32 * tiles))
    return RowConfig(block_m, block_n, num_warps, num_stages, min(tiles, max(1, programs)))


def _block_m(rows: int, block_n: int, gpu: Gpu | None) -> int:
    if gpu is None:
        return min(2**18 // block_n, triton.next_power_of_2(rows))
    block_m = max(1, 4096 // block_n)
    # Too few rows to give every SM a full tile: one row per program.
    return block_m if rows >= block_m * gpu.num_sms else 1


def refuse_dtensor(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise TypeError for a DTensor: a kernel would take its local shard for the whole."""
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            raise TypeError(
                f"{op}: got a DTensor, allowed are local tensors; call it on `x.to_local()` where "
                "the last dimension is whole on every rank, or inside `local_map`"
            )


def check_rows(op: str, x: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """Raise unless `x` is (..., N) of a float dtype and each parameter (N,) on its device."""
    refuse_dtensor(op, x, *parameters.values())
    for name, tensor in (("x", x), *parameters.items()):
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; allowed are fp16, bf16, fp32, fp64")
    if x.ndim == 0 or x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; allowed is (..., N ≤ {MAX_WIDTH})")
    for name, tensor in parameters.items():
        if tensor is not None and (tensor.shape != x.shape[-1:] or tensor.device != x.device):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)} on {tensor.device}; x of shape "
                f"{tuple(x.shape)} on {x.device} needs ({x.shape[-1]},) there"
            )


@lru_cache(maxsize=64)
def launch_gpu(device: torch.device) -> Gpu | None:
    """Return the GPU whose numbers a launch rule may use; None for CPU tensors (interpreted).

    A GPU that the table lacks, or a slice of one, gets the H200's row with its own number of SMs:
    a launch rule needs no more, and nothing is judged by it.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        gpu = gpu_from_device_name(properties.name)
    except ValueError:
        gpu = find_gpu("h200")
    return replace(gpu, num_sms=properties.multi_processor_count)


# Pointers of a row-wise kernel to tensors of the rows' own dtype; all others are accumulators.
_ROW_POINTERS = ("x_ptr", "y_ptr", "dx_ptr", "dy_ptr", "weight_ptr", "bias_ptr")


def row_build(
    kernel: Any,
    chosen: RowConfig,
    dtype: str,
    constants: Mapping[str, Any],
    max_registers: int,
    absent: Sequence[str] = (),
) -> KernelBuild:
    """Describe how a row-wise kernel is compiled, its signature read from its argument names.

    Args:
        kernel: arguments `*_ptr`, `stride_*`, `num_*` and upper-case constants.
        chosen: its tile, warps and stages.
        dtype: Triton's name of the rows' dtype ("bf16").
        constants: compile-time constants beyond the tile's.
        max_registers: registers per thread allowed.
        absent: pointers that are None.
    """
    tile = {
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "NUM_STAGES": chosen.num_stages,
    }
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr") and name not in absent:
            signature[name] = f"*{dtype}" if name in _ROW_POINTERS else "*fp32"
        elif name.islower() and name not in absent:
            # Rows of models are multiples of 16 apart, as the launch finds and specialises for.
            signature[name] = "i32:16" if name.startswith("stride_") else "i32"
    own = {name: value for name, value in tile.items() if name in kernel.arg_names}
    return KernelBuild(
        kernel,
        signature,
        {**constants, **own, **dict.fromkeys(absent)},
        num_warps=chosen.num_warps,
        max_registers=max_registers,
    )


@jit
def _column_sum_kernel(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    partials_ptr,
    first_ptr,
    second_ptr,
    num_partials,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    which = tl.program_id(0) // NUM_BLOCKS
    cols = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_P).to(tl.int64)
    base_ptr = partials_ptr + which.to(tl.int64) * num_partials * N
    total = tl.zeros((BLOCK_P, BLOCK_N), partials_ptr.dtype.element_ty)
    for start in range(0, num_partials, BLOCK_P):
        mask = (start + rows < num_partials)[:, None] & (cols < N)[None, :]
        total += tl.load(base_ptr + (start + rows)[:, None] * N + cols[None, :], mask, other=0.0)
    column_sum = tl.sum(total, axis=0)
    tl.store(first_ptr + cols, column_sum, (cols < N) & (which == 0))
    if second_ptr is not None:
        tl.store(second_ptr + cols, column_sum, (cols < N) & (which == 1))


def column_sums(
    partials: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None
) -> None:
    """Sum partial results of programs in a fixed order, rounding once to each output's dtype.

    Args:
        partials: (1 or 2, num_partials, N), contiguous, in accumulator dtype.
        first: (N,), receives the sum of `partials[0]`.
        second: (N,), receives the sum of `partials[1]`, where there are two.
    """
    count, num_partials, width = partials.shape
    assert count == (1 if second is None else 2)
    block_n = COLUMN_SUM_BLOCK if partials.is_cuda else min(triton.next_power_of_2(width), 16384)
    _column_sum_kernel[(count * triton.cdiv(width, block_n),)](
        partials, first, second, num_partials, N=width, BLOCK_P=32, BLOCK_N=block_n
    )


def column_sums_build(width: int, dtype: str, num_sums: int = 1) -> KernelBuild:
    """Describe how the kernel of `column_sums` is compiled for outputs of Triton's `dtype`."""
    outputs = ("first_ptr", "second_ptr")
    return KernelBuild(
        _column_sum_kernel,
        {
            "partials_ptr": "*fp32",
            "num_partials": "i32",
            **dict.fromkeys(outputs[:num_sums], f"*{dtype}"),
        },
        {
            "N": width,
            "BLOCK_P": 32,
            "BLOCK_N": COLUMN_SUM_BLOCK,
            **dict.fromkeys(outputs[num_sums:]),
        },
        max_registers=64,
    )

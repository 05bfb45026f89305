"""What row-wise reductions share: tensors as rows, launch rules, checks, sums over programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.op import KernelBuild
from nearlight.core.triton import jit

# Rows of one and two columns were seen to cancel exactly in plain PyTorch, where fused
# multiply-adds leave noise; some more go without them, because rows so short cost nothing.
FEW_COLUMNS = 16
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


def row_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (rows, N) of `as_rows(tensor)`, which is not empty."""
    width = tensor.shape[-1]
    return tensor.numel() // width, width


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over `dtype` run in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def triton_accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return `accumulator(dtype)` as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_pipe(dtype: torch.dtype) -> str:
    """Return the pipe that element-wise work on `dtype` runs on."""
    return "fp64" if accumulator(dtype) == torch.float64 else "fp32"


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

    @property
    def holds_parameters(self) -> bool:
        """Whether a row's parameters stay in registers while a program walks over its rows."""
        return self.block_n <= MAX_HELD_BLOCK


def forward_config(
    shape: tuple[int, int], gpu: Gpu | None, elements_per_thread: int = 32
) -> RowConfig:
    """Choose the launch of a pass that reads (rows, N) and writes as much.

    One program per tile.

    Args:
        shape: rows and their width.
        gpu: None for the interpreter, where a program costs the same whatever its tile.
        elements_per_thread: by default four 16-byte loads of bf16 in flight before the first use;
            with more, fewer warps wait at the barriers of sums that follow one another.
    """
    rows, width = shape
    if width > MAX_BLOCK:
        # Few large programs: of the rows in flight more stays in L2 for the second read.
        return RowConfig(1, MAX_BLOCK // 2 if gpu else MAX_BLOCK, 32 if gpu else 4, 1, rows)
    block_n = triton.next_power_of_2(width)
    block_m = _block_m(rows, block_n, gpu, 4096)
    num_warps = min(32, max(1, block_m * block_n // (32 * elements_per_thread)))
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
    block_m = 1 if is_wide else _block_m(rows, block_n, gpu, 2048)
    num_warps = min(32, max(1, block_m * block_n // 512))
    num_stages = 1
    if block_n <= MAX_HELD_BLOCK:  # beyond, the pipeline would carry the parameters, too
        stage_bytes = _stage_bytes(block_m, block_n, dtype)
        num_stages += min(2, (gpu.shared_bytes_per_block - 4096) // stage_bytes)
    # As many as the registers of an SM hold.
    warps_per_sm = 32 if is_wide else 16
    tile = RowConfig(block_m, block_n, num_warps, num_stages, 0)
    return _with_programs(tile, shape, dtype, gpu, warps_per_sm)


def _with_programs(
    tile: RowConfig, shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu, warps_per_sm: int
) -> RowConfig:
    """Return a backward's tile with so many programs that each SM gets its warps."""
    tiles = triton.cdiv(shape[0], tile.block_m)
    programs = max(1, warps_per_sm // tile.num_warps) * gpu.num_sms
    programs //= triton.cdiv(shape[1], tile.block_n)
    if dtype.itemsize >= 4:
        # A sum of n numbers one by one errs as √n: a program's tiles and the programs, of which
        # `column_sums` takes 32 at once, share the number fairly.
        programs = max(programs, isqrt(32 * tiles))
    return replace(tile, num_programs=min(tiles, max(1, programs)))


def _stage_bytes(block_m: int, block_n: int, dtype: torch.dtype) -> int:
    """Return a stage's shared memory: rows, upstream gradients (fp32 at most), and parameters.

    Parameters only where they are not held.
    """
    rows_bytes = block_m * block_n * (dtype.itemsize + max(dtype.itemsize, 4))
    return rows_bytes + (0 if block_n <= MAX_HELD_BLOCK else block_n * 4)


def forward_candidates(shape: tuple[int, int], gpu: Gpu | None) -> dict[RowConfig, str]:
    """Return the launches worth a try beside `forward_config`'s; arguments as there."""
    rows, width = shape
    if gpu is None:
        return {}
    if width > MAX_BLOCK:
        wide = product((4096, 8192, MAX_BLOCK), (8, 16, 32), (1, 2, 3))
        return dict.fromkeys((RowConfig(1, *each, rows) for each in wide), "")
    found, block_n = {}, triton.next_power_of_2(width)
    for tile, per_thread in product((1024, 2048, 4096, 8192, 16384), (8, 16, 32, 64)):
        block_m = max(1, tile // block_n)
        num_warps = block_m * block_n // (32 * per_thread)
        if 1 <= num_warps <= 32:
            programs = triton.cdiv(rows, block_m)
            found[RowConfig(block_m, block_n, num_warps, 1, programs)] = ""
    return found


def backward_candidates(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, num_sums: int = 1
) -> dict[RowConfig, str]:
    """Return the launches worth a try beside `backward_config`'s; arguments as there."""
    if gpu is None:
        return {}
    found: dict[RowConfig, str] = {}
    rule = backward_config(shape, dtype, gpu, num_sums)
    if rule.block_n < shape[1]:
        tiles = [(1, block_n) for block_n in (1024, 2048, 4096)]
    else:
        sizes = (rule.block_m // 2, rule.block_m, 2 * rule.block_m)
        tiles = [(block_m, rule.block_n) for block_m in sizes if block_m]
    for (block_m, block_n), per_thread, stages, warps_per_sm in product(
        tiles, (8, 16, 32), (1, 2, 3), (16, 32)
    ):
        num_warps = block_m * block_n // (32 * per_thread)
        if 1 <= num_warps <= 32:
            tile = RowConfig(block_m, block_n, num_warps, stages, 0)
            needed = 4096 + (stages - 1) * _stage_bytes(block_m, block_n, dtype)
            allowed = gpu.shared_bytes_per_block
            reason = f"{needed} bytes of shared memory, a block has {allowed}"
            found.setdefault(
                _with_programs(tile, shape, dtype, gpu, warps_per_sm),
                reason if needed > allowed else "",
            )
    return found


def _block_m(rows: int, block_n: int, gpu: Gpu | None, tile: int) -> int:
    if gpu is None:
        return min(2**18 // block_n, triton.next_power_of_2(rows))
    block_m = max(1, tile // block_n)
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
    block_n = COLUMN_SUM_BLOCK
    if launch_gpu(partials.device) is None:
        block_n = min(triton.next_power_of_2(width), 16384)
    _column_sum_kernel[(count * triton.cdiv(width, block_n),)](
        partials, first, second, num_partials, N=width, BLOCK_P=32, BLOCK_N=block_n
    )


def row_forward(
    kernels: tuple[Any, Any],
    chosen: RowConfig,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    **constants: Any,
) -> None:
    """Launch the forward pass of a row-wise op.

    Args:
        kernels: for rows that fit into a tile, and for wider ones. Arguments: x, parameters,
            outputs, the row stride of x; number of rows for the first.
        chosen: the launch.
        x: (..., N), not empty.
        parameters: (N,) each, or None.
        outputs: contiguous; y and what the backward needs of each row.
        constants: compile-time constants beyond N, ACC and the tile's.
    """
    x_rows = as_rows(x)
    rows, width = x_rows.shape
    tensors = (x_rows, *map(_contiguous, parameters), *outputs, x_rows.stride(0))
    constants |= {"N": width, "ACC": triton_accumulator(x.dtype), "BLOCK_N": chosen.block_n}
    constants["num_warps"] = chosen.num_warps
    if chosen.block_n < width:
        kernels[1][(rows,)](*tensors, NUM_STAGES=chosen.num_stages, **constants)
    else:
        kernels[0][(chosen.num_programs,)](*tensors, rows, BLOCK_M=chosen.block_m, **constants)


def row_backward(
    kernels: tuple[Any, Any],
    chosen: RowConfig,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: Sequence[torch.Tensor],
    dx: torch.Tensor | None,
    sums: Sequence[torch.Tensor | None],
    **constants: Any,
) -> None:
    """Launch the backward pass of a row-wise op; gradients that are None are not computed.

    Args:
        kernels: the pass itself, and the one before it that projects rows too wide for a tile.
            Arguments: dy, x, weight, statistics, projections (or None), then for the first dx,
            a partial sum per parameter; the row strides of dy and x; number of rows.
        chosen: the launch.
        dy: (..., N).
        x: (..., N), not empty.
        weight: (N,) or None.
        statistics: of each row, as the forward wrote them; a row has as many projections.
        dx: (..., N), contiguous, to be written.
        sums: (N,), gradients of the parameters, to be written.
        constants: compile-time constants beyond N, ACC, HOLD and the tile's.
    """
    dy_rows, x_rows = as_rows(dy), as_rows(x)
    rows, width = x_rows.shape
    acc = accumulator(x.dtype)
    constants |= {"N": width, "ACC": triton_accumulator(x.dtype), "BLOCK_N": chosen.block_n}
    constants |= {"NUM_STAGES": chosen.num_stages, "num_warps": chosen.num_warps}
    tensors = dy_rows, x_rows, _contiguous(weight), *statistics
    strides = dy_rows.stride(0), x_rows.stride(0)
    projections = None
    if dx is not None and chosen.block_n < width:
        projections = torch.empty(len(statistics), rows, dtype=acc, device=x.device)
        kernels[1][(rows,)](*tensors, projections, *strides, **constants)
    needed = [gradient for gradient in sums if gradient is not None]
    partials = torch.empty(len(needed), chosen.num_programs, width, dtype=acc, device=x.device)
    places = iter([partials] if len(needed) == 1 else partials)
    kernels[0][(chosen.num_programs * triton.cdiv(width, chosen.block_n),)](
        *tensors,
        projections,
        dx,
        *(None if gradient is None else next(places) for gradient in sums),
        *strides,
        rows,
        BLOCK_M=chosen.block_m,
        HOLD=chosen.holds_parameters,
        **constants,
    )
    if needed:
        column_sums(partials, *needed)


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def with_budgets(builds: Sequence[KernelBuild], forward_registers: int) -> list[KernelBuild]:
    """Give the kernels of a row-wise op the registers they may take, by their names."""
    return [
        replace(
            build,
            # A backward program of any size must find room on an SM.
            max_registers=min(144, 65536 // (32 * build.num_warps))
            if "_bwd_" in build.kernel.fn.__name__
            else forward_registers,
        )
        for build in builds
    ]

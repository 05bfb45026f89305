"""What row-wise reductions share: tensors as rows, checks, launchers, sums over programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
from nearlight.core.op import KernelBuild
from nearlight.core.row_config import RowConfig
from nearlight.core.triton import jit

# Rows of one and two columns were seen to cancel exactly in plain PyTorch, where fused
# multiply-adds leave noise; some more go without them, because rows so short cost nothing.
FEW_COLUMNS = 16
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_WIDTH = 262_144
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


@jit
def add_residual(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    x, residual_ptr, sum_ptr, row, cols, stride_residual, N: tl.constexpr, mask, ACC: tl.constexpr
):
    """Return x plus the residual, rounded as it is stored in the sum."""
    total = x + tl.load(residual_ptr + row * stride_residual + cols, mask, other=0.0).to(ACC)
    total = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * N + cols, total, mask)
    return total.to(ACC)


@jit
def store_dx(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    dx,
    dx_ptr,
    dsum_ptr,
    dresidual_ptr,
    rows,
    cols,
    stride_dsum,
    N: tl.constexpr,
    mask,
    ACC: tl.constexpr,
):
    """Add the gradient of the sum, where there is one, and store in the dtypes asked for."""
    if dsum_ptr is not None:
        dsum_at = rows[:, None] * stride_dsum + cols[None, :]
        dx += tl.load(dsum_ptr + dsum_at, mask, other=0.0).to(ACC)
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + rows[:, None] * N + cols[None, :], dx, mask)


def row_forward(
    kernels: tuple[Any, Any],
    chosen: RowConfig,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
    **constants: Any,
) -> None:
    """Launch the forward pass of a row-wise op.

    Args:
        kernels: for rows that fit into a tile, and for wider ones. Arguments: x, parameters,
            outputs, residual and sum, the row strides of x and residual; number of rows for the
            first.
        chosen: the launch.
        x: (..., N), not empty.
        parameters: (N,) each, or None.
        outputs: contiguous; y and what the backward needs of each row.
        residual: (..., N) added to x before all else, or None.
        summed: (..., N), contiguous, receives that sum.
        constants: compile-time constants beyond N, ACC and the tile's.
    """
    x_rows = as_rows(x)
    rows, width = x_rows.shape
    residual_rows = None if residual is None else as_rows(residual)
    strides = x_rows.stride(0), None if residual_rows is None else residual_rows.stride(0)
    tensors = x_rows, *map(_contiguous, parameters), *outputs, residual_rows, summed, *strides
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
    dsummed: torch.Tensor | None = None,
    dresidual: torch.Tensor | None = None,
    **constants: Any,
) -> None:
    """Launch the backward pass of a row-wise op; gradients that are None are not computed.

    Args:
        kernels: the pass itself, and the one before it that projects rows too wide for a tile.
            Arguments: dy, x, weight, statistics, projections (or None), then for the first dx,
            a partial sum per parameter, dsummed, dresidual; the row strides of dy and x, for the
            first of dsummed and the number of rows.
        chosen: the launch.
        dy: (..., N).
        x: (..., N), not empty.
        weight: (N,) or None.
        statistics: of each row, as the forward wrote them; a row has as many projections.
        dx: (..., N), contiguous, to be written.
        sums: (N,), gradients of the parameters, to be written.
        dsummed: (..., N), what else flows into x, added to its gradient; or None.
        dresidual: (..., N), contiguous, receives that gradient in its own dtype; or None.
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
    dsummed_rows = None if dsummed is None else as_rows(dsummed)
    needed = [gradient for gradient in sums if gradient is not None]
    partials = torch.empty(len(needed), chosen.num_programs, width, dtype=acc, device=x.device)
    places = iter([partials] if len(needed) == 1 else partials)
    kernels[0][(chosen.num_programs * triton.cdiv(width, chosen.block_n),)](
        *tensors,
        projections,
        dx,
        *(None if gradient is None else next(places) for gradient in sums),
        dsummed_rows,
        dresidual,
        *strides,
        None if dsummed_rows is None else dsummed_rows.stride(0),
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
    """Give the kernels of a row-wise op the registers they may take, by their names.

    Args:
        builds: what the op launches.
        forward_registers: of a forward kernel with 32 elements per thread; more elements get more.
    """

    def budget(build: KernelBuild) -> int:
        threads = 32 * build.num_warps
        if "_bwd_" in build.kernel.fn.__name__:  # a program of any size must find room on an SM
            return min(144, 65536 // threads)
        elements = build.constants.get("BLOCK_M", 1) * build.constants["BLOCK_N"]
        return forward_registers * max(1, elements // (32 * threads))

    return [replace(build, max_registers=budget(build)) for build in builds]

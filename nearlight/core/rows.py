"""What row-wise reductions share: tensors as rows, checks, sums over programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
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
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


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

"""The embedding as torch ops: schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator, accumulator_pipe
from nearlight.ops.embedding.kernels import gather, piece_length, sum_rows


def check_indices(indices: torch.Tensor, rows: int) -> None:
    """Raise ValueError for an index of a CPU tensor outside [0, rows)."""
    outside = indices[(indices < 0) | (indices >= rows)]
    if outside.numel():
        raise ValueError(f"embedding: an index is not in [0, {rows}): {int(outside[0])}")


def forward(
    indices: torch.Tensor, weight: torch.Tensor, scale: float, padding_idx: int
) -> torch.Tensor:
    """Return the rows, (..., D)."""
    out = _forward_fake(indices, weight, scale, padding_idx)
    is_right = torch.ones((), dtype=torch.int32, device=weight.device)
    gather(out, indices.reshape(-1).contiguous(), weight, is_right, scale)
    if is_right.is_cuda:  # no wait for the device
        torch._assert_async(is_right, f"embedding: an index is not in [0, {len(weight)})")
    elif is_right.is_cpu and not bool(is_right):
        check_indices(indices, len(weight))
    return out


def _forward_fake(
    indices: torch.Tensor, weight: torch.Tensor, scale: float, padding_idx: int
) -> torch.Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def backward(
    dout: torch.Tensor, indices: torch.Tensor, rows: int, scale: float, padding_idx: int
) -> torch.Tensor:
    """Return the gradient of the table, (V, D)."""
    dweight = _backward_fake(dout, indices, rows, scale, padding_idx)
    if dout.numel() == 0 or rows == 0:
        return dweight.zero_()
    keys = indices.reshape(-1)
    if rows < 2**31:  # half the passes of a radix sort
        keys = keys.to(torch.int32)
    keys, order = torch.sort(keys, stable=True)
    values = torch.arange(rows + 1, dtype=keys.dtype, device=keys.device)
    bounds = torch.searchsorted(keys, values)
    sum_rows(dweight, dout.reshape(-1, dout.shape[-1]), keys, order, bounds, scale, padding_idx)
    return dweight


def _backward_fake(
    dout: torch.Tensor, indices: torch.Tensor, rows: int, scale: float, padding_idx: int
) -> torch.Tensor:
    return dout.new_empty((rows, dout.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    indices, weight, ctx.scale, ctx.padding_idx = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    dweight = backward_op(dout, *ctx.saved_tensors, ctx.rows, ctx.scale, ctx.padding_idx)
    return None, dweight, None, None


def forward_cost(args: Sequence[Any], kwargs: Any, out: torch.Tensor) -> Cost:
    """Count each row that is read once, at least, and each row written."""
    indices, weight, *_ = args
    rows_bytes = min(indices.numel(), weight.shape[0]) * weight.shape[1] * weight.element_size()
    return Cost(
        flops={accumulator_pipe(weight.dtype): out.numel()},
        bytes_read=tensor_bytes(indices) + rows_bytes,
        bytes_written=tensor_bytes(out),
        num_kernels=3,
    )


def backward_cost(args: Sequence[Any], kwargs: Any, dweight: torch.Tensor) -> Cost:
    """Count each upstream row read and each row of the table written once."""
    dout, indices, *_ = args
    rows, width = dweight.shape
    return Cost(
        flops={accumulator_pipe(dout.dtype): dout.numel()},
        bytes_read=tensor_bytes(indices) + tensor_bytes(dout),
        bytes_written=tensor_bytes(dweight),
        num_kernels=6,
        workspace_bytes=workspace_bytes(indices.numel(), rows, width, dout.dtype),
    )


def workspace_bytes(tokens: int, rows: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the pieces, the bounds, and the sort with its own workspace."""
    pieces = tokens // piece_length(tokens) * width * accumulator(dtype).itemsize
    return pieces + 16 * (rows + 1) + 64 * tokens + 8192


backward_op = register_op(
    "embedding_bwd(Tensor dout, Tensor indices, SymInt rows, float scale, int padding_idx) "
    "-> Tensor",
    backward,
    fake=_backward_fake,
    cost=backward_cost,
)
forward_op = register_op(
    "embedding_fwd(Tensor indices, Tensor weight, float scale, int padding_idx) -> Tensor",
    forward,
    fake=_forward_fake,
    cost=forward_cost,
    backward=_differentiate,
    save=_save,
)

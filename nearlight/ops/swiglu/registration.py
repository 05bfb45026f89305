"""SwiGLU as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.launch import launch_gpu
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator_pipe, triton_accumulator
from nearlight.ops.swiglu.kernels import _swiglu_bwd_kernel, _swiglu_fwd_kernel, config


def merge_dims(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Merge the dimensions that all tensors can walk as one.

    Args:
        shape: the common shape.
        strides: strides of each tensor; the first one's order of memory is followed.

    Returns:
        Dimensions from the outermost to the innermost, each (size, stride of each tensor).
    """
    merged: list[tuple[int, ...]] = []
    for dim in sorted(range(len(shape)), key=lambda dim: strides[0][dim], reverse=True):
        size, steps = shape[dim], tuple(stride[dim] for stride in strides)
        if size == 1:
            continue
        if merged and all(
            outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)
        ):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def _launch(kernel: Any, written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    """Run a kernel over tensors of one shape, whatever their strides."""
    tensors = written + read
    first = written[0]
    if first.numel() == 0:
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        dims: list[tuple[int, ...]] = [(first.numel(), *[1] * len(tensors))]
    else:
        dims = merge_dims(first.shape, *(tensor.stride() for tensor in tensors))
    if len(dims) > 3:
        # All written tensors lie in one order of memory; copies in that order merge with them.
        return _launch(kernel, written, [torch.empty_like(first).copy_(t) for t in read])
    still = (1, *[0] * len(tensors))
    outer, inner, columns = (*[still] * (3 - len(dims)), *dims)
    rows = outer[0] * inner[0]
    tile = config((rows, columns[0]), first.dtype, launch_gpu(first.device))
    kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(columns[0], tile.block_n),)](
        *tensors,
        rows,
        columns[0],
        inner[0],
        *[step for steps in zip(outer[1:], inner[1:], columns[1:], strict=True) for step in steps],
        ACC=triton_accumulator(first.dtype),
        PRECISE=first.dtype == torch.float32,
        SPLIT_ROWS=outer[0] > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
    )


def _halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = packed.shape[-1] // 2
    return packed.narrow(-1, 0, width), packed.narrow(-1, width, width)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return out, in gate's order of memory."""
    out = torch.empty_like(gate)
    _launch(_swiglu_fwd_kernel, [out], [gate, up])
    return out


def backward(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    _launch(_swiglu_bwd_kernel, [dgate, dup], [dout, gate, up])
    return dgate, dup


def packed_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """Return out for gate and up in one tensor."""
    return forward(*_halves(gate_up))


def packed_backward(dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the one tensor that holds gate and up."""
    dgate_up = torch.empty_like(gate_up)
    _launch(_swiglu_bwd_kernel, [*_halves(dgate_up)], [dout, *_halves(gate_up)])
    return dgate_up


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def forward_cost(args: Sequence[torch.Tensor], kwargs: Any, out: torch.Tensor) -> Cost:
    """Count gate and up read and the output written once; exp is one operation."""
    return Cost(
        flops={accumulator_pipe(out.dtype): 5 * out.numel()},
        bytes_read=sum(tensor_bytes(tensor) for tensor in args),
        bytes_written=tensor_bytes(out),
    )


def backward_cost(args: Sequence[torch.Tensor], kwargs: Any, gradients: Any) -> Cost:
    """Count dout, gate and up read and their gradients written once."""
    written = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    return Cost(
        flops={accumulator_pipe(args[0].dtype): 11 * args[0].numel()},
        bytes_read=sum(tensor_bytes(tensor) for tensor in args),
        bytes_written=sum(tensor_bytes(tensor) for tensor in written),
    )


_backward_op = register_op(
    "swiglu_bwd(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    backward,
    fake=lambda dout, gate, up: (torch.empty_like(gate), torch.empty_like(gate)),
    cost=backward_cost,
)
forward_op = register_op(
    "swiglu_fwd(Tensor gate, Tensor up) -> Tensor",
    forward,
    fake=lambda gate, up: torch.empty_like(gate),
    cost=forward_cost,
    backward=lambda ctx, dout: _backward_op(dout, *ctx.saved_tensors),
    save=_save,
)
_packed_backward_op = register_op(
    "swiglu_packed_bwd(Tensor dout, Tensor gate_up) -> Tensor",
    packed_backward,
    fake=lambda dout, gate_up: torch.empty_like(gate_up),
    cost=backward_cost,
)
packed_forward_op = register_op(
    "swiglu_packed_fwd(Tensor gate_up) -> Tensor",
    packed_forward,
    fake=lambda gate_up: torch.empty_like(_halves(gate_up)[0]),
    cost=forward_cost,
    backward=lambda ctx, dout: _packed_backward_op(dout, *ctx.saved_tensors),
    save=_save,
)

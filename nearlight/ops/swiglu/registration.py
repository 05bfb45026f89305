"""SwiGLU as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, register_cost, tensor_bytes
from nearlight.core.rows import launch_gpu, triton_accumulator
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


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(gate)
    _launch(_swiglu_fwd_kernel, [out], [gate, up])
    return out


def _backward(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    _launch(_swiglu_bwd_kernel, [dgate, dup], [dout, gate, up])
    return dgate, dup


def _packed_forward(gate_up: torch.Tensor) -> torch.Tensor:
    return _forward(*_halves(gate_up))


def _packed_backward(dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    dgate_up = torch.empty_like(gate_up)
    _launch(_swiglu_bwd_kernel, [*_halves(dgate_up)], [dout, *_halves(gate_up)])
    return dgate_up


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "swiglu has no gradient of its gradient; use backend='reference' where one is needed"
    )


_library = torch.library.Library("nearlight", "FRAGMENT")


def _register(schema: str, implementation: Any, fake: Any, backward: Any, save: Any = None) -> Any:
    """Define one op in full and return what to call."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    qualified = f"nearlight::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_autograd(qualified, backward, setup_context=save, lib=_library)
    return getattr(torch.ops.nearlight, name).default


_backward_op: Callable[..., Any] = _register(
    "swiglu_bwd(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _backward,
    lambda dout, gate, up: (torch.empty_like(gate), torch.empty_like(gate)),
    _refuse_double_backward,
)
forward_op: Callable[..., torch.Tensor] = _register(
    "swiglu_fwd(Tensor gate, Tensor up) -> Tensor",
    _forward,
    lambda gate, up: torch.empty_like(gate),
    lambda ctx, dout: _backward_op(dout, *ctx.saved_tensors),
    _save,
)
_packed_backward_op: Callable[..., Any] = _register(
    "swiglu_packed_bwd(Tensor dout, Tensor gate_up) -> Tensor",
    _packed_backward,
    lambda dout, gate_up: torch.empty_like(gate_up),
    _refuse_double_backward,
)
packed_forward_op: Callable[..., torch.Tensor] = _register(
    "swiglu_packed_fwd(Tensor gate_up) -> Tensor",
    _packed_forward,
    lambda gate_up: torch.empty_like(_halves(gate_up)[0]),
    lambda ctx, dout: _packed_backward_op(dout, *ctx.saved_tensors),
    _save,
)


@register_cost("nearlight::swiglu_fwd", "nearlight::swiglu_packed_fwd")
def forward_cost(args: Sequence[torch.Tensor], kwargs: Any, out: torch.Tensor) -> Cost:
    """Count gate and up read and the output written once; exp is one operation."""
    return Cost(
        flops={_pipe(out): 5 * out.numel()},
        bytes_read=sum(tensor_bytes(tensor) for tensor in args),
        bytes_written=tensor_bytes(out),
    )


@register_cost("nearlight::swiglu_bwd", "nearlight::swiglu_packed_bwd")
def backward_cost(args: Sequence[torch.Tensor], kwargs: Any, gradients: Any) -> Cost:
    """Count dout, gate and up read and their gradients written once."""
    written = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    return Cost(
        flops={_pipe(args[0]): 11 * args[0].numel()},
        bytes_read=sum(tensor_bytes(tensor) for tensor in args),
        bytes_written=sum(tensor_bytes(tensor) for tensor in written),
    )


def _pipe(tensor: torch.Tensor) -> str:
    return "fp64" if tensor.dtype == torch.float64 else "fp32"

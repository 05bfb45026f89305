"""LayerNorm as torch ops: launchers, schemas, shapes, gradients and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, register_cost, tensor_bytes
from nearlight.core.hardware import find_gpu
from nearlight.core.rows import (
    MAX_BLOCK,
    accumulator,
    as_rows,
    column_sums,
    launch_gpu,
    triton_accumulator,
)
from nearlight.ops.layer_norm import kernels


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, mean, rstd = _forward_fake(x, weight, bias, eps, dtype)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    x_rows = as_rows(x)
    rows, width = x_rows.shape
    chosen = kernels.config((rows, width), x.dtype, launch_gpu(x.device))
    constants: dict[str, Any] = {
        "N": width,
        "EPS": eps,
        "ACC": triton_accumulator(x.dtype),
        "BLOCK_N": chosen.block_n,
        "num_warps": chosen.num_warps,
    }
    tensors = x_rows, _contiguous(weight), _contiguous(bias), y, mean, rstd
    stride = x_rows.stride(0)
    if chosen.block_n < width:
        kernels._layer_norm_fwd_wide_kernel[(rows,)](
            *tensors, stride, NUM_STAGES=chosen.num_stages, **constants
        )
    else:
        kernels._layer_norm_fwd_kernel[(chosen.num_programs,)](
            *tensors, stride, rows, BLOCK_M=chosen.block_m, **constants
        )
    return y, mean, rstd


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _forward_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    mean = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    return y, mean, torch.empty_like(mean)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = _backward_fake(dy, x, weight, bias, mean, rstd, needs)
    needs_dx, needs_dweight, needs_dbias = needs
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    dy_rows, x_rows = as_rows(dy), as_rows(x)
    rows, width = x_rows.shape
    chosen = kernels.config((rows, width), x.dtype, launch_gpu(x.device), "backward")
    acc = accumulator(x.dtype)
    constants: dict[str, Any] = {
        "N": width,
        "ACC": triton_accumulator(x.dtype),
        "BLOCK_N": chosen.block_n,
        "NUM_STAGES": chosen.num_stages,
        "num_warps": chosen.num_warps,
    }
    tensors = dy_rows, x_rows, _contiguous(weight), mean, rstd
    strides = dy_rows.stride(0), x_rows.stride(0)
    projections = None
    if needs_dx and chosen.block_n < width:
        projections = torch.empty(2, rows, dtype=acc, device=x.device)
        kernels._layer_norm_bwd_projection_kernel[(rows,)](
            *tensors, projections, *strides, **constants
        )
    sums = needs_dweight + needs_dbias
    partials = torch.empty(sums, chosen.num_programs, width, dtype=acc, device=x.device)
    kernels._layer_norm_bwd_kernel[(chosen.num_programs * triton.cdiv(width, chosen.block_n),)](
        *tensors,
        projections,
        dx if needs_dx else None,
        partials[0] if needs_dweight else None,
        partials[-1] if needs_dbias else None,
        *strides,
        rows,
        BLOCK_M=chosen.block_m,
        **constants,
    )
    if sums:
        column_sums(
            partials,
            *(t for t, is_needed in zip((dweight, dbias), needs[1:], strict=True) if is_needed),
        )
    return dx, dweight, dbias


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # A gradient nobody asked for has no elements.
    dx = torch.empty(x.shape if needs[0] else (0,), dtype=x.dtype, device=x.device)
    dweight, dbias = (
        torch.empty(
            x.shape[-1:] if is_needed else (0,),
            dtype=x.dtype if parameter is None else parameter.dtype,
            device=x.device,
        )
        for parameter, is_needed in zip((weight, bias), needs[1:], strict=True)
    )
    return dx, dweight, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, *_ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    if dy is None:
        return (None,) * 5
    grads = backward_op(dy, *ctx.saved_tensors, needs)
    return (
        *(g if is_needed else None for g, is_needed in zip(grads, needs, strict=True)),
        None,
        None,
    )


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "layer_norm has no gradient of its gradient; use backend='reference' where one is needed"
    )


_library = torch.library.Library("nearlight", "FRAGMENT")
_library.define(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "bool[] needs) -> (Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("layer_norm_fwd", _forward, _device)
    _library.impl("layer_norm_bwd", _backward, _device)
torch.library.register_fake("nearlight::layer_norm_fwd", _forward_fake, lib=_library)
torch.library.register_fake("nearlight::layer_norm_bwd", _backward_fake, lib=_library)
torch.library.register_autograd(
    "nearlight::layer_norm_fwd", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd("nearlight::layer_norm_bwd", _refuse_double_backward, lib=_library)
forward_op = torch.ops.nearlight.layer_norm_fwd.default
backward_op = torch.ops.nearlight.layer_norm_bwd.default


@register_cost("nearlight::layer_norm_fwd")
def forward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each output written once."""
    x, weight, bias, *_ = args
    # mean and rstd follow from x: they are no part of the fewest bytes.
    return Cost(
        flops={_pipe(x): 7 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (x, weight, bias) if t is not None),
        bytes_written=tensor_bytes(outputs[0]),
    )


@register_cost("nearlight::layer_norm_bwd")
def backward_cost(args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]) -> Cost:
    """Count each input read and each gradient written once; partial sums are workspace."""
    dy, x, weight, *_, needs = args
    width, sums = x.shape[-1], sum(needs[1:])
    return Cost(
        flops={_pipe(x): 13 * x.numel()},
        bytes_read=sum(tensor_bytes(t) for t in (dy, x, weight) if t is not None),
        bytes_written=sum(tensor_bytes(t) for t in outputs),
        num_kernels=1 + (sums > 0) + (needs[0] and width > MAX_BLOCK // 2),
        workspace_bytes=workspace_bytes(x.numel() // max(width, 1), width, x.dtype, sums),
    )


def _pipe(x: torch.Tensor) -> str:
    return "fp64" if x.dtype == torch.float64 else "fp32"


def workspace_bytes(rows: int, width: int, dtype: torch.dtype, sums: int) -> int:
    """Return the bytes that live only during a backward pass, as launched on an H200."""
    chosen = kernels.config((rows, width), dtype, find_gpu("h200"), "backward")
    elements = chosen.num_programs * width * sums + 2 * rows * (chosen.block_n < width)
    return elements * accumulator(dtype).itemsize

"""A linear layer with an adapter as torch ops: schema, fake, autograd and cost.

The adapter's part is written first and cuBLAS adds the large product to it: its epilogue reads what
is there while other tiles are multiplied, where an addition afterwards would be a pass of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from nearlight.core.cost import Cost, matmul_pipe, tensor_bytes
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator
from nearlight.ops._linear_logits import as_matrix
from nearlight.ops.lora_linear.kernels import Dropout, across, down, up

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    lora_a: bool
    lora_b: bool
    bias: bool


def _dropout(seed: torch.Tensor | None, p: float) -> Dropout | None:
    return None if seed is None else Dropout(seed, p)


def _fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, low = _fwd_fake(x, weight, lora_a, lora_b, bias, seed, scale, p)
    if y.numel() == 0:
        return y, low
    rows, out = as_matrix(x), y.view(-1, y.shape[-1])
    low = down(rows, lora_a, low.dtype, dropout=_dropout(seed, p))
    up(out, low, lora_b.t(), scale, None if bias is None else bias.contiguous())
    out.addmm_(rows, as_matrix(weight).t())
    return y, low


def _bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    low: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    p: float,
    needs: Sequence[bool],
) -> Gradients:
    gradients = _bwd_fake(dy, x, weight, lora_a, lora_b, low, seed, scale, p, needs)
    wanted = Needs(*needs)
    if dy.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dx, dweight, da, db, dbias = gradients
    above, rows = as_matrix(dy), as_matrix(x)
    dropout, out = _dropout(seed, p), dx.view(-1, x.shape[-1]) if wanted.x else None
    if wanted.x or wanted.lora_a:
        dlow = down(above, lora_b.t(), lora_a.dtype, scale)
        if wanted.lora_a:
            da = across(rows, dlow, 1.0, dropout, out, lora_a if wanted.x else None)
        elif out is not None:
            up(out, dlow, lora_a, 1.0, None, dropout)
    if out is not None:
        out.addmm_(above, as_matrix(weight))
    if wanted.lora_b:
        db = across(above, low, scale, is_transposed=True)
    if wanted.weight:
        torch.mm(above.t(), rows, out=dweight)
    if wanted.bias:
        dbias = above.sum(0, dtype=accumulator(dy.dtype)).to(dy.dtype)
    return dx, dweight, da, db, dbias


def _fwd_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, rank = x.shape[:-1], lora_a.shape[0]
    return x.new_empty((*rows, weight.shape[0])), lora_a.new_empty((prod(rows), rank))


def _bwd_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    low: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    p: float,
    needs: Sequence[bool],
) -> Gradients:
    shapes = x.shape, weight.shape, lora_a.shape, lora_b.shape, weight.shape[:1]
    like = x, x, lora_a, lora_b, x
    dx, dweight, da, db, dbias = (
        tensor.new_empty(shape if is_needed else (0,))
        for tensor, shape, is_needed in zip(like, shapes, needs, strict=True)
    )
    return dx, dweight, da, db, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, lora_a, lora_b, _bias, seed, ctx.scale, ctx.p = inputs
    low = output[1]
    ctx.mark_non_differentiable(low)
    ctx.set_materialize_grads(False)  # or autograd makes zeros for what has no gradient
    ctx.save_for_backward(x, weight, lora_a, lora_b, low, seed)


def _backward(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    needs = Needs(*ctx.needs_input_grad[:5])
    if dy is None:
        return (None,) * 8
    gradients = _backward_op(dy, *ctx.saved_tensors, ctx.scale, ctx.p, list(needs))
    found = (
        gradient if is_needed else None
        for gradient, is_needed in zip(gradients, needs, strict=True)
    )
    return *found, None, None, None


def call_cost(
    x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> Cost:
    """Return the cost of the forward: y = x Wᵀ, x Aᵀ and its product with Bᵀ, each tensor once."""
    rows, rank, (outer, inner) = prod(x.shape[:-1]), lora_a.shape[0], weight.shape
    return Cost(
        flops={matmul_pipe(x.dtype): 2 * rows * (outer * inner + rank * (outer + inner))},
        bytes_read=sum(map(tensor_bytes, (x, weight, lora_a, lora_b))),
        bytes_written=rows * outer * x.dtype.itemsize,
        num_kernels=4,
        workspace_bytes=rows * rank * lora_a.dtype.itemsize,
        pattern="matmul",
    )


def backward_cost(
    needs: Needs,
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
) -> Cost:
    """Return the cost of the backward: a large product for dx and dW each, two or three narrow."""
    rows, rank, (outer, inner) = prod(x.shape[:-1]), lora_a.shape[0], weight.shape
    has_low = needs.x or needs.lora_a
    flops = (needs.x + needs.weight) * outer * inner
    flops += rank * ((has_low + needs.lora_b) * outer + (needs.x + needs.lora_a) * inner)
    read = [(needs.x, weight), (needs.weight or needs.lora_a, x), (has_low, lora_b)]
    read.append((needs.x, lora_a))
    written = [(needs.x, x), (needs.weight, weight), (needs.lora_a, lora_a), (needs.lora_b, lora_b)]
    return Cost(
        flops={matmul_pipe(x.dtype): 2 * rows * flops},
        bytes_read=rows * outer * x.dtype.itemsize
        + sum(tensor_bytes(tensor) for is_read, tensor in read if is_read),
        bytes_written=sum(tensor_bytes(tensor) for is_needed, tensor in written if is_needed)
        + needs.bias * outer * x.dtype.itemsize,
        num_kernels=3 * has_low + 3 * needs.lora_b + sum(needs),
        workspace_bytes=rows * rank * lora_a.dtype.itemsize,
        pattern="matmul",
    )


def _cost_fwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    return call_cost(*args[:4])


def _cost_bwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    return backward_cost(Needs(*args[9]), *args[1:5])


forward_op = register_op(
    "lora_linear_fwd(Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor? bias, "
    "Tensor? seed, float scale, float p) -> (Tensor, Tensor)",
    _fwd,
    fake=_fwd_fake,
    cost=_cost_fwd,
    backward=_backward,
    save=_save,
)
_backward_op = register_op(
    "lora_linear_bwd(Tensor dy, Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, "
    "Tensor low, Tensor? seed, float scale, float p, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    fake=_bwd_fake,
    cost=_cost_bwd,
)

"""Divergences of two linear heads as torch ops: schema, fake, autograd, cost and their loop.

As in linear_cross_entropy a scalar loss computes the gradients in the forward, while the logits
exist, and a loss per row or in fp16 computes the logits once more in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nearlight.core.cost import Cost, matmul_pipe
from nearlight.core.register import refuse_double_backward, register_op
from nearlight.core.rows import accumulator
from nearlight.ops._chunks import Plan, plan, row_pitch
from nearlight.ops._linear_logits import (
    Gradients,
    Needs,
    as_matrix,
    chunks_cost,
    empty_gradients,
    over_chunks,
)
from nearlight.ops.linear_cross_entropy.registration import _keeps_graph, _scale_op
from nearlight.ops.linear_kl_div.kernels import Options, divergence_


class Arguments(NamedTuple):
    """What the forward op takes, all by position; the backward op takes the same after grad_loss.

    Attributes:
        x: (..., H), any strides.
        weight: (V, H), any strides.
        teacher_x: (..., T), any strides.
        teacher_weight: (V, T), any strides.
        labels: (...) int64, any strides.
        bias, teacher_bias: (V,) or None.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher), between them JSD.
        ignore_index, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale,
            reduction, memory_budget_bytes: as in the public functions.
        needs_x, needs_weight, needs_bias: whether to compute the student's gradients.
    """

    x: torch.Tensor
    weight: torch.Tensor
    teacher_x: torch.Tensor
    teacher_weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    teacher_bias: torch.Tensor | None
    beta: float
    ignore_index: int
    temperature: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    reduction: str
    memory_budget_bytes: int | None
    needs_x: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def needs(self) -> Needs:
        """Which gradients are asked for: x, weight, bias."""
        return self.needs_x, self.needs_weight, self.needs_bias

    @property
    def forward_needs(self) -> Needs:
        """Which of them the forward computes: all or none."""
        is_later = self.reduction == "none" or self.x.dtype == torch.float16
        return (False, False, False) if is_later else self.needs

    def plan(self, needs: Needs) -> Plan:
        """Return how the call goes through its rows where these gradients are computed."""
        (vocab, hidden), rows = self.weight.shape, self.labels.numel()
        return chunks_of(rows, vocab, hidden, self.x.dtype, needs[1], self.memory_budget_bytes)

    @property
    def options(self) -> Options:
        """What the divergence is made of."""
        return Options(
            self.beta,
            self.ignore_index,
            self.temperature,
            self.softcap,
            self.logit_scale,
            self.teacher_softcap,
            self.teacher_logit_scale,
        )


_NUM_TENSORS, _NUM_ARGUMENTS = 7, len(Arguments._fields)
_SCHEMA = (
    "Tensor x, Tensor weight, Tensor teacher_x, Tensor teacher_weight, Tensor labels, "
    "Tensor? bias, Tensor? teacher_bias, float beta, int ignore_index, float temperature, "
    "float? softcap, float logit_scale, float? teacher_softcap, float teacher_logit_scale, "
    "str reduction, int? memory_budget_bytes, bool needs_x, bool needs_weight, bool needs_bias"
)


def chunks_of(
    rows: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    needs_weight: bool,
    budget_bytes: int | None,
) -> Plan:
    """Return the chunks of a call, of which two models' logits exist at once."""
    return plan(rows, vocab, hidden, dtype, needs_weight, budget_bytes, num_buffers=2)


def divisor_of(
    labels: torch.Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return what the sum of the rows is divided by, 0-d: see the public functions."""
    if reduction == "mean":
        return (labels != ignore_index).sum().to(dtype)
    batch = labels.shape[0] if labels.ndim and reduction == "batchmean" else 1
    return torch.full((), batch, dtype=dtype, device=labels.device)


def _run(
    arguments: Arguments, needs: Needs, grad_loss: torch.Tensor | None = None
) -> tuple[torch.Tensor, *Gradients]:
    x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias = arguments[:7]
    dtype = accumulator(x.dtype)
    flat = labels.reshape(-1).contiguous()
    divisor = divisor_of(labels, arguments.ignore_index, arguments.reduction, dtype)
    row_weight = torch.where(divisor != 0, 1.0 / divisor, 0.0).expand(flat.shape)
    if grad_loss is not None:
        row_weight = row_weight * grad_loss.reshape(-1)
    loss = x.new_zeros(flat.shape, dtype=dtype)
    steps, vocab = arguments.plan(needs), weight.shape[0]
    others, head = as_matrix(teacher_x), as_matrix(teacher_weight).t()
    buffer = x.new_empty(steps.rows, row_pitch(vocab))
    if vocab % 16:  # the kernel reads whole vectors, and uses nothing beyond the vocabulary
        buffer[:, vocab : -(-vocab // 16) * 16] = 0
    options = arguments.options

    def turn(logits: torch.Tensor, rows: slice) -> None:
        teacher = buffer[: logits.shape[0], :vocab]
        if teacher_bias is None:
            torch.mm(others[rows], head, out=teacher)
        else:
            torch.addmm(teacher_bias, others[rows], head, out=teacher)
        divergence_(logits, teacher, flat[rows], row_weight[rows], loss[rows], options, any(needs))

    gradients = over_chunks(as_matrix(x), as_matrix(weight), bias, needs, steps, turn)
    grad_x, grad_weight, grad_bias = gradients
    grad_x = grad_x.view(x.shape) if needs[0] else grad_x
    return loss.view(labels.shape), grad_x, grad_weight, grad_bias


def _fwd(*args: Any) -> tuple[torch.Tensor, *Gradients]:
    arguments = Arguments(*args)
    if arguments.forward_needs != arguments.needs:  # what the backward could not do is refused here
        arguments.plan(arguments.needs)
    loss, grad_x, grad_weight, grad_bias = _run(arguments, arguments.forward_needs)
    if arguments.reduction != "none":
        loss = loss.sum()
    return loss, grad_x, grad_weight, grad_bias


def _bwd(grad_loss: torch.Tensor, *args: Any) -> Gradients:
    arguments = Arguments(*args)
    return _run(arguments, arguments.needs, grad_loss)[1:]


def _fwd_fake(*args: Any) -> tuple[torch.Tensor, *Gradients]:
    arguments = Arguments(*args)
    x, shape = arguments.x, arguments.labels.shape if arguments.reduction == "none" else ()
    loss = x.new_empty(shape, dtype=accumulator(x.dtype))
    return loss, *empty_gradients(x, arguments.weight, arguments.forward_needs)


def _bwd_fake(grad_loss: torch.Tensor, *args: Any) -> Gradients:
    arguments = Arguments(*args)
    return empty_gradients(arguments.x, arguments.weight, arguments.needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as the gradients
    arguments = Arguments(*inputs)
    ctx.needs = arguments.needs
    ctx.has_gradients = any(arguments.forward_needs)
    if ctx.has_gradients:
        ctx.save_for_backward(*output[1:])
    else:
        ctx.save_for_backward(*inputs[:_NUM_TENSORS])
        ctx.options = inputs[_NUM_TENSORS:]


def _backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_double_backward("linear_kl_div and linear_jsd: a divergence")
    if grad_loss is None:
        return (None,) * _NUM_ARGUMENTS
    gradients = ctx.saved_tensors  # read once: a checkpoint gives them out no second time
    if not ctx.has_gradients:
        gradients = _backward_op(grad_loss, *gradients, *ctx.options)
    elif _keeps_graph(gradients[0]):
        gradients = [(g.to(grad_loss.dtype) * grad_loss).to(g.dtype) for g in gradients]
    else:
        _scale_op([g for g in gradients if g.numel()], grad_loss)
    grad_x, grad_weight, grad_bias = (
        gradient if is_needed else None
        for gradient, is_needed in zip(gradients, ctx.needs, strict=True)
    )
    return grad_x, grad_weight, None, None, None, grad_bias, *(None,) * (_NUM_ARGUMENTS - 6)


def call_cost(
    rows: int,
    vocab: int,
    hidden: int,
    teacher_hidden: int,
    dtype: torch.dtype,
    needs: Needs,
    budget_bytes: int | None = None,
) -> Cost:
    """Return the cost of one pass over the chunks: both logits once, and what `needs` asks for."""
    steps = chunks_of(rows, vocab, hidden, dtype, needs[1], budget_bytes)
    # Per chunk both models' logits and the kernel; per call the divisor, the weights, the sum.
    cost = chunks_cost(rows, vocab, hidden, dtype, needs, steps, 3, 9)
    return cost + Cost(
        flops={matmul_pipe(dtype): 2 * rows * vocab * teacher_hidden},
        bytes_read=(rows + vocab) * teacher_hidden * dtype.itemsize,
    )


def _cost(arguments: Arguments, needs: Needs) -> Cost:
    (vocab, hidden), rows = arguments.weight.shape, arguments.labels.numel()
    return call_cost(
        rows,
        vocab,
        hidden,
        arguments.teacher_weight.shape[1],
        arguments.x.dtype,
        needs,
        arguments.memory_budget_bytes,
    )


def _cost_fwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    arguments = Arguments(*args)
    return _cost(arguments, arguments.forward_needs)


def _cost_bwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    arguments = Arguments(*args[1:])
    return _cost(arguments, arguments.needs)


forward_op = register_op(
    f"linear_divergence_fwd({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    fake=_fwd_fake,
    cost=_cost_fwd,
    backward=_backward,
    save=_setup_context,
)
_backward_op = register_op(
    f"linear_divergence_bwd(Tensor grad_loss, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    fake=_bwd_fake,
    cost=_cost_bwd,
)

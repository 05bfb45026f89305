"""Linear log prob as torch ops: schema, fake, autograd and cost.

What gradient each row gets is not known in the forward, so the backward computes the logits once
more, chunk by chunk as the forward did: the same products of the same shapes give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nearlight.core.cost import Cost
from nearlight.core.register import refuse_double_backward, register_op
from nearlight.core.rows import accumulator
from nearlight.ops._chunks import plan
from nearlight.ops._linear_logits import (
    Gradients,
    Needs,
    Turn,
    as_matrix,
    check_labels,
    chunks_cost,
    empty_gradients,
    over_chunks,
)
from nearlight.ops.linear_log_prob.kernels import Options, log_prob_of, logits_gradient_

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """What the forward op takes, by position; the backward op after its gradients and statistics.

    Attributes:
        x: (..., H), any strides.
        weight: (V, H), any strides.
        labels: (...) int64, any strides.
        bias: (V,) or None.
        ignore_index, softcap, logit_scale, temperature, return_entropy, memory_budget_bytes: as
            in the public function.
        needs_x: whether to compute the gradient of x.
        needs_weight: of the weight.
        needs_bias: of the bias.
    """

    x: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    return_entropy: bool
    memory_budget_bytes: int | None
    needs_x: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def needs(self) -> Needs:
        """Which gradients are asked for: x, weight, bias."""
        return self.needs_x, self.needs_weight, self.needs_bias

    @property
    def options(self) -> Options:
        """How logits become final."""
        return Options(self.ignore_index, self.softcap, self.logit_scale, self.temperature)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, vocabulary and hidden width."""
        return self.labels.numel(), *self.weight.shape


_NUM_TENSORS, _NUM_ARGUMENTS = 4, len(Arguments._fields)
_SCHEMA = (
    "Tensor x, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, float? softcap, "
    "float logit_scale, float temperature, bool return_entropy, int? memory_budget_bytes, "
    "bool needs_x, bool needs_weight, bool needs_bias"
)


def _over_chunks(arguments: Arguments, needs: Needs, turn: Turn) -> Gradients:
    x, weight, _labels, bias = arguments[:4]
    # Forward and backward take the same chunks.
    steps = plan(*arguments.sizes, x.dtype, arguments.needs_weight, arguments.memory_budget_bytes)
    return over_chunks(as_matrix(x), as_matrix(weight), bias, needs, steps, turn)


def _fwd(*args: Any) -> Outputs:
    arguments = Arguments(*args)
    x, weight, labels = arguments[:3]
    flat = labels.reshape(-1).contiguous()
    check_labels("linear_log_prob", flat, weight.shape[0], arguments.ignore_index)
    shape = 4 if arguments.return_entropy else 3, flat.shape[0]
    statistics = torch.empty(shape, dtype=accumulator(x.dtype), device=x.device)

    def turn(logits: torch.Tensor, rows: slice) -> None:
        log_prob_of(logits, flat[rows], statistics[:, rows].unbind(), arguments.options)

    _over_chunks(arguments, (False, False, False), turn)
    # Copies and no views: the caller may change them in place, and the backward does not see it.
    copies = [statistics.new_empty(labels.shape) for _ in range(shape[0] - 2)]
    for copy, row in zip(copies, statistics[2:], strict=True):
        copy.copy_(row.view(labels.shape))
    log_prob, entropy = copies if arguments.return_entropy else (*copies, statistics.new_empty(0))
    return log_prob, entropy, statistics


def _bwd(
    grad_log_prob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    statistics: torch.Tensor,
    *args: Any,
) -> Gradients:
    arguments = Arguments(*args)
    flat = arguments.labels.reshape(-1).contiguous()
    upstream = [
        None if gradient is None else gradient.reshape(-1).contiguous()
        for gradient in (grad_log_prob, grad_entropy)
    ]

    def turn(logits: torch.Tensor, rows: slice) -> None:
        of_log_prob, of_entropy = (None if each is None else each[rows] for each in upstream)
        logits_gradient_(
            logits,
            flat[rows],
            statistics[:, rows].unbind(),
            of_log_prob,
            of_entropy,
            arguments.options,
        )

    grad_x, grad_weight, grad_bias = _over_chunks(arguments, arguments.needs, turn)
    grad_x = grad_x.view(arguments.x.shape) if arguments.needs_x else grad_x
    return grad_x, grad_weight, grad_bias


def _fwd_fake(*args: Any) -> Outputs:
    arguments = Arguments(*args)
    x, shape = arguments.x, arguments.labels.shape
    dtype, num_rows = accumulator(x.dtype), arguments.labels.numel()
    entropy = x.new_empty(shape if arguments.return_entropy else (0,), dtype=dtype)
    statistics = x.new_empty((4 if arguments.return_entropy else 3, num_rows), dtype=dtype)
    return x.new_empty(shape, dtype=dtype), entropy, statistics


def _bwd_fake(
    grad_log_prob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    statistics: torch.Tensor,
    *args: Any,
) -> Gradients:
    arguments = Arguments(*args)
    return empty_gradients(arguments.x, arguments.weight, arguments.needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    arguments = Arguments(*inputs)
    _log_prob, entropy, statistics = output
    ctx.mark_non_differentiable(*([] if arguments.return_entropy else [entropy]), statistics)
    ctx.set_materialize_grads(False)  # an output without a gradient costs the kernel nothing
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], statistics)
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.needs = arguments.needs


def _backward(
    ctx: Any, grad_log_prob: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: None
) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_double_backward("linear_log_prob")
    if grad_log_prob is None and grad_entropy is None:
        return (None,) * _NUM_ARGUMENTS
    *inputs, statistics = ctx.saved_tensors
    gradients = _backward_op(grad_log_prob, grad_entropy, statistics, *inputs, *ctx.options)
    grad_x, grad_weight, grad_bias = (
        gradient if is_needed else None
        for gradient, is_needed in zip(gradients, ctx.needs, strict=True)
    )
    return grad_x, grad_weight, None, grad_bias, *(None,) * (_NUM_ARGUMENTS - _NUM_TENSORS)


def call_cost(
    rows: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    needs: Needs,
    needs_weight: bool,
    budget_bytes: int | None = None,
) -> Cost:
    """Return the cost of one pass over the chunks: logits once, and what `needs` asks for.

    Args:
        rows: of the call.
        vocab: columns of the logits.
        hidden: width of x.
        dtype: of x and the weight.
        needs: the gradients that this pass computes.
        needs_weight: whether any pass computes that of the weight, which decides the chunks.
        budget_bytes: as in the public function.
    """
    steps = plan(rows, vocab, hidden, dtype, needs_weight, budget_bytes)
    # Per chunk the logits and their kernel; per call what checks labels and copies.
    return chunks_cost(rows, vocab, hidden, dtype, needs, steps, 2, 12)


def _cost(arguments: Arguments, needs: Needs) -> Cost:
    return call_cost(
        *arguments.sizes,
        arguments.x.dtype,
        needs,
        arguments.needs_weight,
        arguments.memory_budget_bytes,
    )


def _cost_fwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    return _cost(Arguments(*args), (False, False, False))


def _cost_bwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    arguments = Arguments(*args[3:])
    return _cost(arguments, arguments.needs)


forward_op = register_op(
    f"linear_log_prob_fwd({_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _fwd,
    fake=_fwd_fake,
    cost=_cost_fwd,
    backward=_backward,
    save=_setup_context,
)
_backward_op = register_op(
    "linear_log_prob_bwd(Tensor? grad_log_prob, Tensor? grad_entropy, Tensor statistics, "
    f"{_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    fake=_bwd_fake,
    cost=_cost_bwd,
)

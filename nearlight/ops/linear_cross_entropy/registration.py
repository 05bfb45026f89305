"""Linear cross entropy as torch ops: schema, fake, autograd and cost.

A scalar loss computes the gradients in the forward, while the logits exist: three matrix products
in all, and the backward only scales the results. A loss per row cannot, since every row gets its
own upstream gradient; nor does fp16, where gradients that are not yet multiplied by the loss
scale underflow. Their backward computes the logits once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.register import refuse_double_backward, register_op
from nearlight.core.rows import accumulator
from nearlight.ops._chunks import plan
from nearlight.ops._linear_logits import Gradients, Needs, chunks_cost, empty_gradients
from nearlight.ops.linear_cross_entropy.kernels import scale_
from nearlight.ops.linear_cross_entropy.loop import Arguments, run

_NUM_TENSORS, _NUM_ARGUMENTS = 7, len(Arguments._fields)
_SCHEMA = (
    "Tensor x, Tensor weight, Tensor labels, Tensor? bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, int ignore_index, float label_smoothing, "
    "float z_loss, float? softcap, float logit_scale, str reduction, int? memory_budget_bytes, "
    "bool needs_x, bool needs_weight, bool needs_bias"
)


def _fwd(*args: Any) -> tuple[torch.Tensor, *Gradients]:
    arguments = Arguments(*args)
    if arguments.forward_needs != arguments.needs:  # what the backward could not do is refused here
        arguments.plan(arguments.needs)
    loss, grad_x, grad_weight, grad_bias = run(arguments, arguments.forward_needs)
    if arguments.reduction != "none":
        loss = loss.sum()
    return loss, grad_x, grad_weight, grad_bias


def _bwd(grad_loss: torch.Tensor, *args: Any) -> Gradients:
    arguments = Arguments(*args)
    return run(arguments, arguments.needs, grad_loss)[1:]


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients:
        scale_(gradient, factor)


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


def _keeps_graph(saved: torch.Tensor) -> bool:
    """Return whether what the forward saved must outlive this backward.

    So it is with retain_graph, where another backward may follow; and in a graph that is being
    traced, which must not write into what its forward returned.
    """
    if torch.compiler.is_compiling() or isinstance(saved, FunctionalTensor):
        return True
    # The only way to learn of retain_graph; torch's own compiled backward asks it, too.
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_double_backward("linear_cross_entropy")
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
    return grad_x, grad_weight, None, grad_bias, *(None,) * (_NUM_ARGUMENTS - 4)


def call_cost(
    rows: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    needs: Needs,
    budget_bytes: int | None = None,
) -> Cost:
    """Return the cost of one pass over the chunks: logits once, and what `needs` asks for."""
    steps = plan(rows, vocab, hidden, dtype, needs[1], budget_bytes)
    # Per chunk the logits, the loss, its copy; per call what checks labels, divides and adds.
    return chunks_cost(rows, vocab, hidden, dtype, needs, steps, 3, 13)


def _cost_fwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    arguments = Arguments(*args)
    return _cost(arguments, arguments.forward_needs)


def _cost_bwd(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    arguments = Arguments(*args[1:])
    return _cost(arguments, arguments.needs)


def _cost(arguments: Arguments, needs: Needs) -> Cost:
    (vocab, hidden), rows = arguments.weight.shape, arguments.labels.numel()
    budget_bytes = arguments.memory_budget_bytes
    return call_cost(rows, vocab, hidden, arguments.x.dtype, needs, budget_bytes)


def _cost_scale(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    """The usual factor is 1, which the kernels notice and leave: launches, no bytes."""
    return Cost(num_kernels=len(args[0]), bytes_read=tensor_bytes(args[1]))


_GRADIENTS = "Tensor, Tensor, Tensor"
forward_op = register_op(
    f"linear_cross_entropy_fwd({_SCHEMA}) -> (Tensor, {_GRADIENTS})",
    _fwd,
    fake=_fwd_fake,
    cost=_cost_fwd,
    backward=_backward,
    save=_setup_context,
)
_backward_op = register_op(
    f"linear_cross_entropy_bwd(Tensor grad_loss, {_SCHEMA}) -> ({_GRADIENTS})",
    _bwd,
    fake=_bwd_fake,
    cost=_cost_bwd,
)
_scale_op = register_op(
    "linear_cross_entropy_scale_(Tensor(a!)[] gradients, Tensor factor) -> ()",
    _scale,
    fake=lambda gradients, factor: None,
    cost=_cost_scale,
)

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

from nearlight.core.cost import Cost, matmul_pipe, tensor_bytes
from nearlight.core.register import refuse_double_backward, register_op
from nearlight.core.rows import accumulator
from nearlight.ops.linear_cross_entropy.chunks import plan
from nearlight.ops.linear_cross_entropy.kernels import scale_
from nearlight.ops.linear_cross_entropy.loop import Arguments, Gradients, Needs, run

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
        rows, budget_bytes = arguments.labels.numel(), arguments.memory_budget_bytes
        vocab, hidden = arguments.weight.shape
        plan(rows, vocab, hidden, arguments.x.dtype, arguments.needs_weight, budget_bytes)
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


def _fake_gradients(arguments: Arguments, needs: Needs) -> Gradients:
    x, weight = arguments[:2]
    shapes = (x.shape, weight.shape, weight.shape[:1])
    grad_x, grad_weight, grad_bias = (
        x.new_empty(shape if is_needed else (0,))
        for shape, is_needed in zip(shapes, needs, strict=True)
    )
    return grad_x, grad_weight, grad_bias


def _fwd_fake(*args: Any) -> tuple[torch.Tensor, *Gradients]:
    arguments = Arguments(*args)
    x, shape = arguments.x, arguments.labels.shape if arguments.reduction == "none" else ()
    loss = x.new_empty(shape, dtype=accumulator(x.dtype))
    return loss, *_fake_gradients(arguments, arguments.forward_needs)


def _bwd_fake(grad_loss: torch.Tensor, *args: Any) -> Gradients:
    arguments = Arguments(*args)
    return _fake_gradients(arguments, arguments.needs)


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
    products = 1 + needs[0] + needs[1]
    matrix_bytes = (rows + vocab) * hidden * dtype.itemsize
    kernels = 3 + needs[0] + needs[1] + 2 * needs[2]  # logits, loss, its copy
    if steps.product_columns:
        kernels += 2 * -(-vocab // steps.product_columns) - 1
    return Cost(
        flops={matmul_pipe(dtype): 2 * rows * vocab * hidden * products},
        bytes_read=matrix_bytes + rows * 8,
        bytes_written=(needs[0] * rows + needs[1] * vocab) * hidden * dtype.itemsize
        + needs[2] * vocab * dtype.itemsize,
        num_kernels=_NUM_SMALL_KERNELS + steps.num_chunks * kernels,
        workspace_bytes=steps.workspace_bytes + rows * VECTOR_BYTES_PER_ROW,
        pattern="matmul",
    )


# Loss, its copy, labels' checks, weights: at most so much per row at any time.
VECTOR_BYTES_PER_ROW = 64
# Kernels of the label check, the divisor and the final sum.
_NUM_SMALL_KERNELS = 13


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

"""Cross entropy as torch ops: schemas, shapes, gradients and costs.

A scalar loss computes the gradient with the loss, where the logits are read anyway: the backward
only scales it. A loss per row cannot, since every row gets its own upstream gradient; nor does
fp16, where gradients not yet multiplied by the loss scale underflow; nor a graph being compiled,
which may not scale in place what its forward returned. Their backward reads the logits once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.register import refuse_double_backward, register_op
from nearlight.core.rows import accumulator_pipe
from nearlight.ops.cross_entropy import launchers
from nearlight.ops.cross_entropy.launchers import Arguments, Results, empty_results
from nearlight.ops.linear_cross_entropy.registration import _keeps_graph

_NUM_ARGUMENTS, _NUM_TENSORS = len(Arguments._fields), 5
_SCHEMA = (
    "Tensor labels, Tensor? class_weight, Tensor? token_weight, Tensor? num_items, "
    "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale, "
    "str reduction, str[] stats, bool has_gradient, bool has_later_gradient"
)
# Per exponential: its argument, itself and what is summed.
_FLOPS_PER_ELEMENT = 5


def _forward(*args: Any) -> Results:
    return launchers.forward(Arguments(*args))


def _forward_fake(*args: Any) -> Results:
    arguments = Arguments(*args)
    results = empty_results(arguments)
    return (
        results
        if arguments.reduction == "none"
        else results._replace(loss=results.loss.new_empty(()))
    )


def _forward_in_place(*args: Any) -> Results:
    return launchers.forward(Arguments(*args), is_in_place=True)


def _backward_fake(grad_loss: torch.Tensor, *args: Any) -> torch.Tensor:
    logits = args[2]
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(gradient)
    launchers.scale(gradient, target, factor)
    return target


def _scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    launchers.scale(gradient, gradient, factor)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as the gradient
    results = Results(*output)
    ctx.has_gradient = Arguments(*inputs).has_gradient
    if ctx.has_gradient:
        ctx.save_for_backward(results.gradient)
    else:
        ctx.save_for_backward(results.statistics, results.divisor, *inputs[:_NUM_TENSORS])
        ctx.options = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_double_backward("cross_entropy")
    gradient = None
    if grad_loss is not None:
        saved = ctx.saved_tensors  # read once: a checkpoint gives them out no second time
        if ctx.has_gradient:
            gradient = _times(saved[0], grad_loss)
        else:
            gradient = _backward_op(grad_loss, *saved, *ctx.options)
    return gradient, *(None,) * (_NUM_ARGUMENTS - 1)


def _times(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Scale what the forward saved: in place, unless another backward may follow."""
    if _keeps_graph(gradient):
        scaled: torch.Tensor = _scaled_op(gradient, factor)
        return scaled
    _scale_op(gradient, factor)
    increment_version(gradient)
    return gradient


class InPlace(torch.autograd.Function):
    """The loss of logits whose memory the gradient takes over."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return loss, logsumexp, argmax and entropy, and leave the gradient in the logits."""
        memory = logits.detach()  # shares its version: who else saved the logits gets an error
        results = Results(*forward_in_place_op(memory, *rest))
        increment_version(memory)
        ctx.save_for_backward(memory)
        ctx.mark_non_differentiable(*results[4:])
        ctx.set_materialize_grads(False)
        return results.loss, *results[4:]

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
        """Scale the gradient where it lies."""
        if torch.is_grad_enabled():
            refuse_double_backward("cross_entropy")
        gradient = None if grad_loss is None else _times(ctx.saved_tensors[0], grad_loss)
        return gradient, *(None,) * (_NUM_ARGUMENTS - 1)


def _vector_bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor is not None)


def cost_fwd(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Any]) -> Cost:
    """Count the logits read once, and the gradient written once where it is computed."""
    arguments, results = Arguments(*args), Results(*outputs)
    logits = arguments.logits
    num_exponentials = logits.numel() * (1 + arguments.has_gradient)
    return Cost(
        flops={accumulator_pipe(logits.dtype): _FLOPS_PER_ELEMENT * num_exponentials},
        bytes_read=_vector_bytes(args[:_NUM_TENSORS]),
        bytes_written=_vector_bytes((results.gradient, results.loss, *results[4:])),
        num_kernels=2 + (arguments.reduction != "none"),
        workspace_bytes=extra_bytes(arguments.labels.numel()),
    )


def _cost_fwd_in_place(args: Any, kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    return cost_fwd(args, kwargs, outputs) + Cost(bytes_written=tensor_bytes(args[0]))


def cost_bwd(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    """Count the logits read and the gradient written once."""
    logits = args[3]
    return Cost(
        flops={accumulator_pipe(logits.dtype): _FLOPS_PER_ELEMENT * logits.numel()},
        bytes_read=_vector_bytes((args[0], *args[3 : 3 + _NUM_TENSORS])),
        bytes_written=tensor_bytes(outputs),
    )


def _cost_scale(args: Any, kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    """The usual factor is 1, which the kernel notices and leaves: a launch, no bytes."""
    return Cost(num_kernels=1, bytes_read=tensor_bytes(args[1]))


def _cost_scaled(args: Any, kwargs: Mapping[str, Any], outputs: Any) -> Cost:
    return Cost(bytes_read=tensor_bytes(args[0]), bytes_written=tensor_bytes(outputs))


def extra_bytes(rows: int) -> int:
    """Return what lives beside logits and gradient: losses, statistics and labels of the rows."""
    return 64 * rows + 4096


_RESULTS = ", ".join(["Tensor"] * len(Results._fields))
forward_op = register_op(
    f"cross_entropy_fwd(Tensor logits, {_SCHEMA}) -> ({_RESULTS})",
    _forward,
    fake=_forward_fake,
    cost=cost_fwd,
    backward=_differentiate,
    save=_save,
)
forward_in_place_op = register_op(
    f"cross_entropy_fwd_(Tensor(a!) logits, {_SCHEMA}) -> ({_RESULTS})",
    _forward_in_place,
    fake=_forward_fake,
    cost=_cost_fwd_in_place,
)
_backward_op = register_op(
    f"cross_entropy_bwd(Tensor grad_loss, Tensor statistics, Tensor divisor, Tensor logits, "
    f"{_SCHEMA}) -> Tensor",
    launchers.backward,
    fake=_backward_fake,
    cost=cost_bwd,
)
_scaled_op = register_op(
    "cross_entropy_scaled(Tensor gradient, Tensor factor) -> Tensor",
    _scaled,
    fake=lambda gradient, factor: torch.empty_like(gradient),
    cost=_cost_scaled,
)
_scale_op = register_op(
    "cross_entropy_scale_(Tensor(a!) gradient, Tensor factor) -> ()",
    _scale_,
    fake=lambda gradient, factor: None,
    cost=_cost_scale,
)

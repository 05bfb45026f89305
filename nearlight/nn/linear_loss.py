"""Fused linear loss inside a live causal language model, without a copy of any forward.

The model's own forward runs as it is. While it runs with labels in training, the head keeps its
input and answers with logits of width 0; whatever stands between head and loss (softcap, logit
scaling) costs nothing on an empty tensor; the loss function then computes head and loss in one op
that never holds all logits. Router losses and outputs are left to the model.

Rule: fused if and only if `labels` is given, the model is in training mode, and nothing needs real
logits at that call: head and loss function are those that were patched, and the head has no hook
but forward-pre hooks. Then `outputs.logits` has width 0, and so has whatever else calls the head
during that forward. Else logits and loss are the model's own.
A batch whose labels are all ignored has loss 0 and zero gradients here; transformers gives NaN.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nearlight import ops
from nearlight.nn.hooks import hook_in_the_way

# What transformers computes as ForCausalLMLoss, too.
_SAME_LOSS = ("ForConditionalGeneration",)


class _Call:
    """One running forward: the head that keeps its input (None: nothing is fused) and the input."""

    def __init__(self, head: nn.Module | None) -> None:
        self.head = head
        self.hidden: torch.Tensor | None = None


class _Calls(threading.local):
    """Running forwards of this thread, innermost last; nothing is ever kept on a module."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_calls = _Calls()


def head_attributes(base: type[nn.Module]) -> Mapping[str, Any]:
    """Return what a patched head overrides: `forward`, which keeps its input when asked to."""
    original = base.forward

    @functools.wraps(original)
    def forward(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
        if _calls.stack and _calls.stack[-1].head is self:
            _calls.stack[-1].hidden = input
            return input.new_empty((*input.shape[:-1], 0))
        return original(self, input)

    return {"forward": forward, "keeps_input": True}


def model_attributes(base: Any, softcap: str = "", divisor: str = "") -> Mapping[str, Any]:
    """Return what a patched model overrides: `forward` (opens a call) and `loss_function`.

    Args:
        base: a class with `lm_head`, `loss_function` and a forward that takes `labels`.
        softcap: name of the config value its forward caps logits by, cap · tanh(logits / cap).
        divisor: name of the config value its forward divides logits by.
    """
    original = base.forward
    labels_position = list(inspect.signature(original).parameters).index("labels") - 1
    inherited: property = base.loss_function
    own_loss_function: Any = inherited.fget

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[labels_position] if len(args) > labels_position else kwargs.get("labels")
        is_fused = labels is not None and self.training and not _needs_logits(self)
        _calls.stack.append(_Call(self.lm_head if is_fused else None))
        try:
            return original(self, *args, **kwargs)
        finally:
            _calls.stack.pop()

    def loss_function(self: Any) -> Callable[..., torch.Tensor]:
        if _calls.stack and _calls.stack[-1].hidden is not None:
            config = self.config
            return functools.partial(
                _fused_loss,
                self.lm_head,
                getattr(config, softcap) if softcap else None,
                1.0 / getattr(config, divisor) if divisor else 1.0,
            )
        return own_loss_function(self)  # type: ignore[no-any-return]  # foreign

    return {"forward": forward, "loss_function": property(loss_function, inherited.fset)}


def _needs_logits(model: Any) -> bool:
    """Return whether something came after patching that only real logits satisfy.

    A head replaced since (LoRA, modules_to_save, resized) or one with a forward of its own computes
    its own logits, hooks see them, and a loss function set on the model is the user's.
    """
    head = model.lm_head
    return (
        not getattr(type(head), "keeps_input", False)
        or "forward" in head.__dict__
        or "_loss_function" in model.__dict__
        or getattr(model, "loss_type", None) not in (None, "ForCausalLM", *_SAME_LOSS)
        or hook_in_the_way(head, is_called=True) != ""
    )


def _fused_loss(
    head: nn.Linear,
    softcap: float | None,
    logit_scale: float,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,  # transformers' loss ignores the model's other keyword arguments as well
) -> torch.Tensor:
    """Compute what `transformers.loss.ForCausalLMLoss` computes, from the head's input."""
    call = _calls.stack[-1]
    hidden = call.hidden
    assert hidden is not None and logits.shape[-1] == 0
    call.hidden = None
    weight, bias = head.weight, head.bias
    if hasattr(weight, "to_local"):
        raise ValueError(
            "linear_cross_entropy needs the whole lm_head.weight while the loss is computed, but "
            "it is a sharded DTensor there; keep lm_head in the model's root shard group, or "
            "patch without it: patch(model, only=[...])"
        )
    if vocab_size != weight.shape[0]:
        raise ValueError(
            f"lm_head has {weight.shape[0]} rows but the config says vocab_size={vocab_size}; "
            "call model.resize_token_embeddings to make them agree"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(hidden.device).reshape(())
    return ops.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        shift_labels.reshape(-1).to(hidden.device),
        bias,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction="mean" if num_items_in_batch is None else "sum",
        num_items=num_items_in_batch,
    )


def why_not(model: Any) -> str:
    """Return why a causal language model cannot take the fused loss, or "" if it can."""
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear and "keeps_input" not in type(head).__dict__:
        kind = "missing" if head is None else f"a {type(head).__module__}.{type(head).__name__}"
        return f"lm_head is {kind}, not a plain nn.Linear: its own computation must stay"
    assert head is not None
    if "forward" in head.__dict__:
        return "lm_head.forward was replaced on this instance"
    if hook := hook_in_the_way(head, is_called=True):
        return f"lm_head has a {hook} hook, which needs real logits"
    if "_loss_function" in model.__dict__:
        return "the model has a loss function of its own"
    loss = type(model).loss_function.fget(model)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        return f"the model's loss is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
    return ""

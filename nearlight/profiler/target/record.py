"""The record of a target: a program to look at, and how large one step of it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from nearlight.core.errors import BadInput

Batch = dict[str, torch.Tensor]
LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
Task = Literal["train", "prefill", "decode"]
TASKS = get_args(Task)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A program to look at: how to make its model and batch, and what one step computes.

    Attributes:
        name: what the user named.
        task: "train" (loss and gradients), "prefill" (a prompt) or "decode" (one token).
        setup: what was chosen, for line two of any output.
        batch: sequences, or None where the user's code owns the sizes (see `sizes`).
        seq: tokens per sequence; for decode those already in the cache; None as above.
        dtype: "bf16", "fp16", "fp32"; "" where the user's code owns it.
        is_real: False where the weights are random because none came with the target.
        make: `(device, weights) -> (model, batch)`, both of one call of the user's code.
        model_only: `(device, weights) -> model`.
        batch_only: `(device) -> batch`.
        loss_fn: `(model, batch) -> tensor`, of the task.
        is_live: the model is the caller's own object, the same at every `make_model`.
    """

    name: str
    task: Task
    setup: str
    batch: int | None
    seq: int | None
    dtype: str
    is_real: bool
    make: Callable[[str, bool], tuple[nn.Module, Batch]] = field(repr=False)
    model_only: Callable[[str, bool], nn.Module] = field(repr=False)
    batch_only: Callable[[str], Batch] = field(repr=False)
    loss_fn: LossFunction = field(repr=False)
    is_live: bool = False

    def make_model(self, device: str = "cpu", weights: bool = True) -> nn.Module:
        """Return the model, in train mode for the task train, else in eval mode.

        Args:
            device: where its parameters lie.
            weights: False builds from the configuration alone (random values, no weights read
                from disk), which is all that a trace under fake tensors needs.
        """
        return self.model_only(device, weights)

    def make_batch(self, device: str = "cpu") -> Batch:
        """Return the batch: tensors by the names of the forward's arguments."""
        return self.batch_only(device)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Run the task once: the scalar loss for train, else the logits (or first output)."""
        return self.loss_fn(model, batch)


@dataclass(frozen=True)
class Sizes:
    """How much one step works on: samples, and tokens where the batch has any (else None)."""

    num_samples: int
    num_tokens: int | None


def sizes(batch: Batch) -> Sizes:
    """Return samples and tokens of a batch; tokens are counted by `input_ids`."""
    if "input_ids" in batch:
        return Sizes(batch["input_ids"].shape[0], batch["input_ids"].numel())
    first = next(iter(batch.values()))
    return Sizes(first.shape[0] if first.ndim else 1, None)


def task_loss(task: str, loss_fn: LossFunction | None, name: str) -> LossFunction:
    """Return what a task computes in one step, checked to be a scalar for train.

    Args:
        task: "train", "prefill" or "decode".
        loss_fn: `(model, batch) -> scalar`, or None for the loss that the model returns.
        name: how errors call the target.
    """

    def run(model: nn.Module, batch: Batch) -> torch.Tensor:
        if task != "train":
            return first_tensor(model(**batch), name)
        loss: Any
        if loss_fn is not None:
            loss = loss_fn(model, batch)
        else:
            output = model(**batch)
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
            if loss is None and isinstance(output, dict):
                loss = output.get("loss")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise BadInput(
                f"{name}: the loss is {what}, not a scalar tensor; put labels into the batch or "
                "give loss_fn(model, batch) -> scalar"
            )
        return loss

    return run


def first_tensor(output: Any, name: str) -> torch.Tensor:
    """Return the first tensor of a model's output."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    for value in values if isinstance(values, (tuple, list)) or hasattr(output, "values") else ():
        if isinstance(value, torch.Tensor):
            return value
    raise BadInput(f"{name}: the model returned {type(output).__name__} without a tensor")

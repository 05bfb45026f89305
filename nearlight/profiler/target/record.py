"""The record of a target: a program to look at, and how large one step of it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nearlight.core.errors import BadInput
from nearlight.core.hardware import Gpu

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
        """Return the batch: tensors by the names of the forward's arguments.

        Args:
            device: where it lies; "meta" gives sizes alone and takes no memory.
        """
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
            loss = _loss_in(output)
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
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise BadInput(
                f"{name}: no gradient flows from the loss to a parameter, so there is nothing to "
                "train; look for .detach(), torch.no_grad() or .item() on its way, or take task "
                "prefill, which is the forward pass alone"
            )
        return loss

    return run


def _loss_in(output: Any) -> Any:
    """Return the loss of a model's output, or what stands in its place."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        first = output[0]  # (loss, logits, ...)
        return first if isinstance(first, torch.Tensor) and first.numel() == 1 else output
    loss = getattr(output, "loss", None)
    return output.get("loss") if loss is None and isinstance(output, dict) else loss


def check_task(task: str) -> None:
    """Raise BadInput unless this is a task, and one that can run here and now."""
    if task not in TASKS:
        raise BadInput(f"task {task!r}: allowed are {', '.join(TASKS)}")
    if task == "train" and not torch.is_grad_enabled():
        raise BadInput(
            "task train needs gradients, and they are switched off here by torch.no_grad() or "
            "inference_mode(): call it outside, or take task prefill"
        )


def check_model(model: nn.Module, task: str, name: str) -> None:
    """Raise BadInput for a model without shapes, or one to train that has nothing to train."""
    parameters = dict(model.named_parameters())
    tensors = {**parameters, **dict(model.named_buffers())}
    lazy = [key for key, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise BadInput(
            f"{name}: {lazy[0]} belongs to a lazy module, which has no shape yet; run the model "
            "once on a batch before it is given"
        )
    if task == "train" and not any(p.requires_grad for p in parameters.values()):
        what = "all parameters are frozen" if parameters else "the model has no parameters"
        remedy = "unfreeze some with requires_grad_(), or " if parameters else ""
        raise BadInput(
            f"{name}: {what}, so there is nothing to train; {remedy}take task prefill, which is "
            "the forward pass alone"
        )


def check_gpu(target: Target, gpu: Gpu) -> None:
    """Raise BadInput where a GPU has no tensor cores for the dtype that a target was given."""
    if target.dtype and target.dtype not in gpu.peaks_tflops:
        has = [dtype for dtype in DTYPES if dtype in gpu.peaks_tflops]
        raise BadInput(
            f"{gpu.key} has no {target.dtype}: take --dtype {' or --dtype '.join(has)}, or "
            "another --gpu"
        )


def first_tensor(output: Any, name: str) -> torch.Tensor:
    """Return the first tensor of a model's output."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    for value in values if isinstance(values, (tuple, list)) or hasattr(output, "values") else ():
        if isinstance(value, torch.Tensor):
            return value
    raise BadInput(f"{name}: the model returned {type(output).__name__} without a tensor")

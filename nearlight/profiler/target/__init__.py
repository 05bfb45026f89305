"""Turns what the user names into a model, a batch and a loss."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from torch import nn

from nearlight.core.errors import BadInput
from nearlight.profiler.target.functions import check_batch, function_target
from nearlight.profiler.target.language import Wanted, folder_target, preset_target
from nearlight.profiler.target.presets import PRESETS
from nearlight.profiler.target.record import (
    DTYPES,
    TASKS,
    Batch,
    LossFunction,
    Sizes,
    Target,
    check_gpu,
    check_model,
    check_task,
    sizes,
    task_loss,
)

__all__ = [
    "DTYPES",
    "PRESETS",
    "TASKS",
    "Batch",
    "LossFunction",
    "Sizes",
    "Target",
    "check_gpu",
    "from_model",
    "load",
    "sizes",
]


def load(
    target: str | Path,
    task: str = "train",
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
) -> Target:
    """Return the program that the user named.

    Args:
        target: a preset ("smollm2-135m"), a folder with a Hugging Face `config.json` (and
            safetensors, if it has weights), or "file.py:function" where the function takes
            nothing and returns (model, batch) or (model, batch, loss_fn).
        task: "train", "prefill" or "decode".
        batch: sequences, 8 by default; not with a function, which owns its sizes.
        seq: tokens per sequence, 2048 by default or what the model takes at most.
        dtype: "bf16" (default), "fp16" or "fp32" of parameters; not with a function.

    Raises:
        BadInput: nothing has this name, or sizes that make no sense.
        MissingPart: a package that has to be installed.

    Example:
        >>> load("llama-3.2-1b", batch=8, seq=4096).seq
        4096
    """
    check_task(task)
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    for size_name, size in (("batch", batch), ("seq", seq)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise BadInput(f"{size_name} {size!r}: it must be a whole number of at least 1")
    wanted = Wanted(task, batch, seq, dtype or "bf16")  # type: ignore[arg-type]  # checked above
    target = str(target)
    if target.lower() in PRESETS:
        return preset_target(target.lower(), wanted)
    if ".py:" in target:
        given = {"--batch": batch, "--seq": seq, "--dtype": dtype}
        surplus = [option for option, value in given.items() if value is not None]
        if surplus:
            raise BadInput(f"{target} owns its sizes and dtype: leave out {' and '.join(surplus)}")
        return function_target(target, wanted.task)
    if target and Path(target).is_dir():
        return folder_target(Path(target), wanted)
    raise BadInput(_unknown(target))


def _unknown(target: str) -> str:
    if target.endswith(".py"):
        return (
            f"{target}: name the function that returns (model, batch) as {target}:function; "
            "scripts as such are not taken yet"
        )
    if "/" in target:
        near = difflib.get_close_matches(Path(target).name.lower(), PRESETS, n=1, cutoff=0.8)
        hint = f"did you mean the preset {near[0]}? " if near else ""
        return f"{target}: there is no such folder; {hint}It needs a config.json, as on the Hub"
    near = difflib.get_close_matches(target.lower(), PRESETS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown target {target!r}: {hint}It is a preset ({', '.join(PRESETS)}), a folder with "
        "a config.json, or file.py:function"
    )


def from_model(
    model: nn.Module,
    batch: Any,
    task: str = "train",
    loss_fn: LossFunction | None = None,
    name: str | None = None,
) -> Target:
    """Return the target of a live model and its batch; the model itself is used, never a copy.

    Args:
        model: any module; it is left where it lies (`device` is ignored by `make_model`).
        batch: dict of tensors by forward's argument names, or a tensor or tuple of tensors.
        task: "train", "prefill" or "decode".
        loss_fn: `(model, batch) -> scalar`; by default the output's `loss`.
        name: how reports call it; the class by default.

    Raises:
        BadInput: a batch that is no tensors or empty, or a model that cannot run the task.
    """
    name = name or type(model).__name__
    check_task(task)
    if not isinstance(model, nn.Module):
        raise BadInput(f"{type(model).__name__} is no torch.nn.Module")
    check_model(model, task, name)
    tensors = check_batch(model, batch, name)

    def to_device(device: str) -> Batch:
        return {key: value.to(device) for key, value in tensors.items()}

    return Target(
        name=name,
        task=task,  # type: ignore[arg-type]  # checked above
        setup=f"the model and batch given, task {task}",
        batch=None,
        seq=None,
        dtype="",
        is_real=True,
        make=lambda device, weights: (model, to_device(device)),
        model_only=lambda device, weights: model,
        batch_only=to_device,
        loss_fn=task_loss(task, loss_fn, name),
        is_live=True,
    )

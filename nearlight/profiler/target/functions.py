"""A model and its batch out of the user's own file: `file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearlight.core.errors import BadInput, one_line
from nearlight.core.user_code import split_name
from nearlight.profiler.target.record import (
    Batch,
    LossFunction,
    Target,
    Task,
    check_model,
    sizes,
    task_loss,
)

Made = tuple[nn.Module, Batch, LossFunction | None]
_WANTED = "(model, batch) or (model, batch, loss_fn)"


def function_target(name: str, task: Task) -> Target:
    """Return the target of "file.py:function"; the function runs anew for each model and batch."""
    call = load_function(name)
    latest: dict[str, LossFunction | None] = {}

    def make(device: str, weights: bool) -> tuple[nn.Module, Batch]:
        model, batch, latest["loss_fn"] = call()
        check_model(model, task, name)
        model.train(task == "train")
        # Fake parameters cannot be moved, nor need they be: move only what lies elsewhere.
        here = torch.device(device).type
        if any(tensor.device.type != here for tensor in (*model.parameters(), *model.buffers())):
            model.to(device)
        return model, {key: value.to(device) for key, value in batch.items()}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        if "loss_fn" not in latest:
            latest["loss_fn"] = call()[2]
        return task_loss(task, latest["loss_fn"], name)(model, batch)

    return Target(
        name=name,
        task=task,
        setup=f"model and batch of {name}, task {task}",
        batch=None,
        seq=None,
        dtype="",
        is_real=True,
        make=make,
        model_only=lambda device, weights: make(device, weights)[0],
        batch_only=lambda device: make(device, False)[1],
        loss_fn=loss_fn,
    )


def load_function(name: str) -> Callable[[], Made]:
    """Return a call that runs `file.py:function` and checks what it returns.

    The file is executed once, here, with its own folder importable as for a script; the
    function at each call.

    Raises:
        BadInput: no such file or function, a file that fails, a function that needs arguments.
    """
    path, function_name = split_name(name)
    if path is None or not path.is_file():
        raise BadInput(f"{name}: there is no file {path}")
    module = _execute(path, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        has = f"it has {', '.join(found)}" if found else "it has no function"
        raise BadInput(f"{name}: {path} has no function {function_name!r}; {has}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise BadInput(f"{name}: it is called without arguments ({error})") from None

    def call() -> Made:
        try:
            with _importable(path.parent):
                made = function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a script may well call sys.exit
            raise BadInput(f"{name} fails: {one_line(error)}") from error
        return check_made(made, name)

    return call


def check_made(made: Any, name: str) -> Made:
    """Return (model, batch as a dict of tensors, loss function or None), or raise BadInput."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise BadInput(f"{name} returned {what}; it must return {_WANTED}")
    model, batch, *rest = made
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{name} returned {type(model).__name__} as the model; it must be a torch.nn.Module"
        )
    loss_function = rest[0] if rest else None
    if loss_function is not None and not callable(loss_function):
        raise BadInput(
            f"{name} returned {type(loss_function).__name__} as loss_fn; it must be a function "
            "loss_fn(model, batch) -> scalar tensor"
        )
    return model, check_batch(model, batch, name), loss_function


def check_batch(model: nn.Module, batch: Any, name: str) -> Batch:
    """Return the batch as a dict from the forward's argument names to tensors.

    Args:
        model: whose forward it goes into.
        batch: a mapping of tensors, or a tensor or a tuple or list of tensors for the forward's
            first arguments.
        name: how errors call it.
    """
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, (tuple, list)):
        names = [
            parameter.name
            for parameter in inspect.signature(model.forward).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if len(batch) > len(names):
            raise BadInput(
                f"{name}: the batch has {len(batch)} tensors, {type(model).__name__}.forward "
                f"takes {len(names)}; give a dict and a loss_fn(model, batch)"
            )
        batch = dict(zip(names, batch, strict=False))
    if not isinstance(batch, Mapping) or not batch:
        raise BadInput(
            f"{name}: the batch is {type(batch).__name__}; it must be a dict of tensors, a "
            "tensor, or a tuple of tensors"
        )
    wrong = {key: type(v).__name__ for key, v in batch.items() if not isinstance(v, torch.Tensor)}
    if wrong:
        listed = ", ".join(f"{key!r} is {kind}" for key, kind in wrong.items())
        raise BadInput(f"{name}: the batch must hold tensors only; {listed}")
    tensors = dict(batch)
    size = sizes(tensors)
    if 0 in (size.num_samples, size.num_tokens):
        key = "input_ids" if "input_ids" in tensors else next(iter(tensors))
        raise BadInput(
            f"{name}: the batch is empty, {key!r} has shape {tuple(tensors[key].shape)}; give at "
            "least one sample"
        )
    return tensors


def _execute(path: Path, name: str) -> Any:
    module_name = f"_nearlight_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{name}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:  # a script may well call sys.exit
        sys.modules.pop(module_name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise BadInput(f"{name}: {path} fails: {one_line(error)}") from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)

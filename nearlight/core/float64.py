"""The truth of a foreign model: computed in fp64 throughout, where `model.double()` is not."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Module = TypeVar("Module", bound=nn.Module)


class KeepFloat64(TorchDispatchMode):
    """Casts to fp64 where a model asks for fp32: transformers does so for norms, softmax and loss.

    Integers go to fp64 too: positions meet fp64 frequencies in a matmul.
    """

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float32
        if is_cast and args[0].dtype not in (torch.float16, torch.bfloat16):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def float64_copy(module: Module) -> Module:
    """Return a copy of a module in fp64, to be run under `KeepFloat64`."""
    truth = copy.deepcopy(module).double()
    for part in truth.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "eager"  # torch has no grouped_mm in fp64
    return truth

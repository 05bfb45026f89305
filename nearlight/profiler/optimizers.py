"""The optimizers a step can be profiled with, by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw-loop": partial(torch.optim.AdamW, foreach=False),
    "sgd-fused": partial(torch.optim.SGD, fused=True),
    "sgd-foreach": partial(torch.optim.SGD, foreach=True),
}
# Every kernel of the step runs, and a measured model keeps its weights to the bit.
LEARNING_RATE = 0.0


def make_optimizer(name: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return a new optimizer; ValueError names the known ones."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters, lr=LEARNING_RATE)

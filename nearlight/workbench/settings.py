"""What belongs to the process and not to a call: torch's settings, the folder, the generator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# By what sets it: how it is read and written.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "os.chdir": (os.getcwd, os.chdir),
}


@contextmanager
def restored() -> Iterator[list[str]]:
    """Set back what the block has set; the list names it when the block has ended."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (read, write) in SETTINGS.items():
            if read() != before[name]:
                changed.append(name)
                write(before[name])


def left_changed(call: Callable[[], object]) -> str:
    """Say what a call sets for the whole process and leaves so, or return "".

    To draw random numbers is a call's right. It has seeded the generator where that stands in the
    same state after calls that found it in different ones.
    """
    generator = torch.default_generator
    former, states = generator.get_state(), []
    try:
        for seed in range(2):
            generator.manual_seed(seed)
            with restored() as changed:
                call()
            if changed:
                return f"a call leaves {changed[0]} behind it, which is the whole process's"
            states.append(generator.get_state())
    finally:
        generator.set_state(former)
    return "a call seeds torch's random numbers (torch.manual_seed)" * torch.equal(*states)

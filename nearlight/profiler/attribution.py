"""Who called an op: module, Python function and source line, in forward and in backward.

Backward ops are given to the place whose forward op made their autograd node: the node's
sequence number is noted while the forward runs and looked up while the backward does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120  a prefix of strings, tested often
_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120  the same


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program called an op.

    Attributes:
        module: qualified name; the class of the model for the model itself, "" outside.
        module_class: class name of the module.
        function: name of the innermost Python function outside torch.
        line: "file.py:123" of that function's current line, the file without its folder.
    """

    module: str = ""
    module_class: str = ""
    function: str = ""
    line: str = ""


NOWHERE = Place()


def module_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each module by identity; the model itself goes by its class."""
    root = type(model).__name__
    return {id(part): name or root for name, part in model.named_modules()}


class Attribution:
    """Follows a model's modules and autograd nodes during a step.

    Attributes:
        on_module_output: called with every output of every module's forward.
    """

    def __init__(
        self, model: nn.Module, on_module_output: Callable[[Any], None] = lambda output: None
    ) -> None:
        self._names = module_names(model)
        self._stack: list[nn.Module] = []
        self._by_sequence: dict[int, Place] = {}
        self.on_module_output = on_module_output

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow module calls while the block lasts."""
        handles = (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def forget_nodes(self) -> None:
        """Drop what is known of autograd nodes, when a new step starts."""
        self._by_sequence.clear()

    def place(self) -> Place:
        """Return the place of the op that is dispatched right now."""
        node = torch._C._current_autograd_node()
        # Inside a module during backward means that a checkpointed forward runs again.
        if node is not None and not self._stack:
            return self._by_sequence.get(node._sequence_nr(), NOWHERE)
        place = self._here()
        # An op's node takes its number just before the op is dispatched; the first op after
        # that is the one it belongs to.
        self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def is_recomputing(self) -> bool:
        """Return whether a module's forward runs as part of the backward pass."""
        return bool(self._stack) and torch._C._current_autograd_node() is not None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # a module whose forward raised did not leave
        self.on_module_output(output)

    def _here(self) -> Place:
        module = self._stack[-1] if self._stack else None
        function, line = _caller(sys._getframe(2))
        if module is None:
            return Place(function=function, line=line)
        name = self._names.get(id(module), "")
        return Place(name, type(module).__name__, function, line)


def _caller(frame: FrameType | None) -> tuple[str, str]:
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _HERE)):
            return frame.f_code.co_name, f"{filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "", ""

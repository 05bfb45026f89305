"""Guarded memory: what a launcher allocates starts as NaN and stands between two guard zones.

While `guarded()` is open, torch's Python allocation functions hand out tensors inside a larger
buffer, by whatever name an own file calls them. An element that a kernel forgets stays NaN; an
element that it writes beyond the tensor lands in a guard zone, where it is found, and not in the
heap. (On a GPU the compute-sanitizer says more; in the interpreter nothing else says anything.)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from nearlight.core.interpreter import builder
from nearlight.core.user_code import is_own, running_place

# Wider than the tail of the widest tile, so that a missing mask does not reach the heap.
GUARD_BYTES = 1 << 18
# Two bytes that are NaN in bf16, fp16 and fp32, unlike the NaN any arithmetic produces, and unlike
# POISON: so a kernel that reads beyond an input and writes what it read is found as well.
GUARD_PATTERN = 0x7FA5
# NaN in every floating dtype, -1 in every whole one.
POISON_BYTE = 0xFF

_UNFILLED = ("empty", "empty_like", "empty_strided")
_FILLED = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
_UNFILLED_METHODS = ("new_empty", "new_empty_strided")
_FILLED_METHODS = ("new_zeros", "new_ones", "new_full")

_is_own = functools.cache(is_own)


@dataclass(frozen=True)
class _Zone:
    raw: torch.Tensor
    num_bytes: int
    label: str

    def broken(self) -> str:
        """Say where a guard zone was written, or return ""."""
        front, rear = self.raw[:GUARD_BYTES], self.raw[GUARD_BYTES + self.num_bytes :]
        pattern = _pattern_bytes(self.raw.device, self.raw.numel())
        for zone, whole in ((rear, pattern[-rear.numel() :]), (front, pattern[:GUARD_BYTES])):
            if torch.equal(zone, whole):
                continue
            wrong = (zone != whole).nonzero()
            if zone is rear:
                return _past(int(wrong[0]), self.label)
            return f"{GUARD_BYTES - int(wrong[-1])} bytes before the start of {self.label}"
        return ""


@dataclass
class Guard:
    """The zones handed out so far, and what an interpreted kernel was seen to read in them."""

    zones: list[_Zone] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def place(
        self, tensor: torch.Tensor, label: str, keep: bool = True, origin: str = ""
    ) -> torch.Tensor:
        """Return a tensor of the same shape, strides and dtype between two guard zones.

        Args:
            tensor: strided, any device.
            label: how a broken zone names it.
            keep: whether it holds the tensor's values; else it holds NaN.
            origin: the line that allocated it, where it is known.
        """
        extent, size = _extent(tensor), tensor.element_size()
        num_bytes = extent * size
        # An even count, because the pattern is two bytes wide.
        raw = _pattern_bytes(tensor.device, 2 * GUARD_BYTES + num_bytes + num_bytes % 2).clone()
        raw[GUARD_BYTES : GUARD_BYTES + num_bytes] = POISON_BYTE
        # `set_` and not a view: an op's output that is a view of something would look like an
        # alias to autograd.
        bare = torch.tensor([], dtype=tensor.dtype, device=tensor.device)
        start = GUARD_BYTES // size
        placed = bare.set_(raw.untyped_storage(), start, tensor.shape, tensor.stride())
        if keep and extent:
            source = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
            placed.as_strided((extent,), (1,), start).copy_(source)
        allocated = f", allocated at {origin}" if origin else ""
        self.zones.append(_Zone(raw, num_bytes, f"{label} {tuple(tensor.shape)}{allocated}"))
        return placed

    def broken(self) -> list[str]:
        """Say of each zone that was written where, nothing where all are whole."""
        return [text for zone in self.zones if (text := zone.broken())]

    def note_load(self, addresses: np.ndarray[Any, Any]) -> None:
        """Note a load that reads a guard zone: no value tells, where the result drops it."""
        if not addresses.size or self.reads:
            return
        low, high = int(addresses.min()), int(addresses.max())
        for zone in self.zones:
            start = zone.raw.data_ptr() + GUARD_BYTES
            end = start + zone.num_bytes
            if low < start + zone.num_bytes + GUARD_BYTES and high >= start - GUARD_BYTES:
                past = addresses[(addresses >= end) & (addresses < end + GUARD_BYTES)]
                before = addresses[(addresses < start) & (addresses >= start - GUARD_BYTES)]
                if past.size:
                    self.reads.append(_past(int(past[0]) - end, zone.label))
                elif before.size:
                    distance = start - int(before[-1])
                    self.reads.append(f"{distance} bytes before the start of {zone.label}")


def _past(num_bytes: int, label: str) -> str:
    return f"{f'{num_bytes} bytes' if num_bytes else 'right'} past the end of {label}"


@contextmanager
def guarded() -> Iterator[Guard]:
    """Guard everything that Python code allocates through torch inside the block."""
    guard = Guard()

    def wrap(function: Callable[..., Any], keep: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def allocate(*args: Any, **kwargs: Any) -> Any:
            tensor = function(*args, **kwargs)
            is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
            # Triton's interpreter wraps each argument of a launch by `new_empty(0)`.
            if not is_plain or kwargs.get("out") is not None or tensor.shape == (0,):
                return tensor
            label = f"a tensor of torch.{function.__name__}"
            placed = guard.place(tensor, label, keep, running_place())
            return placed.requires_grad_(tensor.requires_grad)

        return allocate

    wrappers: dict[Any, Callable[..., Any]] = {}
    with ExitStack() as stack:
        for owner, names, keep in (
            (torch, _UNFILLED, False),
            (torch, _FILLED, True),
            (torch.Tensor, _UNFILLED_METHODS, False),
            (torch.Tensor, _FILLED_METHODS, True),
        ):
            for name in names:
                function = getattr(owner, name)
                wrappers[function] = wrap(function, keep)
                stack.enter_context(mock.patch.object(owner, name, wrappers[function]))
        for module, name, wrapper in _own_references(wrappers):
            stack.enter_context(mock.patch.object(module, name, wrapper))
        stack.enter_context(mock.patch.object(builder, "on_load", guard.note_load))
        yield guard


def _own_references(
    wrappers: Mapping[Any, Callable[..., Any]],
) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return where ops and users' files hold an allocation function by a name of their own.

    `from torch import empty`, or a `functools.partial` of it: each with what is to stand there.
    """
    found: list[tuple[ModuleType, str, Callable[..., Any]]] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not _is_own(file):
            continue
        for name, value in list(vars(module).items()):
            is_partial = isinstance(value, functools.partial)
            function = value.func if is_partial else value
            if not isinstance(function, BuiltinFunctionType) or function not in wrappers:
                continue
            wrapper = wrappers[function]
            if is_partial:
                wrapper = functools.partial(wrapper, *value.args, **value.keywords)
            found.append((module, name, wrapper))
    return found


@functools.lru_cache(maxsize=8)
def _longest_pattern(device: torch.device, num_bytes: int) -> torch.Tensor:
    words = torch.tensor([GUARD_PATTERN], dtype=torch.int16, device=device)
    return words.expand(num_bytes // 2).contiguous().view(torch.uint8)


def _pattern_bytes(device: torch.device, num_bytes: int) -> torch.Tensor:
    # A few lengths serve all: the next power of two, cut.
    return _longest_pattern(device, 1 << (num_bytes - 1).bit_length())[:num_bytes]


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie between the first and the last of a strided tensor."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))

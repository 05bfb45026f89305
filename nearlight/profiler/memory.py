"""Device memory of a step: what is alive when, who owns it, and what makes the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nearlight.profiler.attribution import NOWHERE, Place

Owner = Literal["parameters", "gradients", "optimizer", "activations", "temporaries", "inputs"]
OWNERS: tuple[Owner, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "inputs",
)
# PyTorch's caching allocator hands out multiples of this.
ALLOCATION_BYTES = 512


@dataclass
class Storage:
    """A block of device memory during its life.

    Attributes:
        num_bytes: size as allocated.
        shape, dtype: of the tensor that first showed it.
        op: op that made it ("" for what exists before the step).
        place: who called that op.
        phase: forward, backward, optimizer or setup.
        name: parameter name, batch key or "".
        owner: whom the bytes are charged to.
        is_module_output: whether a module returned it.
    """

    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    place: Place
    phase: str
    name: str = ""
    owner: Owner = "temporaries"
    is_module_output: bool = False


@dataclass(frozen=True)
class Timeline:
    """Every allocation and release of a step.

    Attributes:
        storages: all blocks that lived during the step, by id.
        initial: ids alive at the start.
        events: `(call, id, is_allocation)` in order; `call` counts recorded calls.
    """

    storages: Mapping[int, Storage]
    initial: tuple[int, ...]
    events: tuple[tuple[int, int, bool], ...]

    def peak(self, without: Callable[[Storage], bool] | None = None) -> Peak:
        """Return the peak, or the peak as it would be if some storages did not exist."""
        sizes = {
            key: 0 if without is not None and without(storage) else storage.num_bytes
            for key, storage in self.storages.items()
        }
        current = sum(sizes[key] for key in self.initial)
        best, best_event = current, -1
        for index, (_, key, is_allocation) in enumerate(self.events):
            current += sizes[key] if is_allocation else -sizes[key]
            if current > best:
                best, best_event = current, index
        return Peak(best, best_event)

    def alive(self, event: int) -> list[Storage]:
        """Return the storages alive right after an event (−1: at the start), largest first."""
        keys = dict.fromkeys(self.initial)
        for _, key, is_allocation in self.events[: event + 1]:
            if is_allocation:
                keys[key] = None
            else:
                keys.pop(key, None)
        return sorted((self.storages[key] for key in keys), key=lambda s: -s.num_bytes)

    def by_owner(self, peak: Peak) -> dict[str, int]:
        """Return the bytes of each owner at the peak; they add up to it."""
        bytes_of: dict[str, int] = dict.fromkeys(OWNERS, 0)
        for storage in self.alive(peak.event):
            bytes_of[storage.owner] += storage.num_bytes
        return bytes_of


@dataclass(frozen=True)
class Peak:
    """The most memory in use at once.

    Attributes:
        num_bytes: allocated bytes.
        event: index into the timeline's events, −1 for the start.
    """

    num_bytes: int
    event: int


class Ledger:
    """Notes when storages appear and vanish; one per trace."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.call = 0
        self._next_id = 0
        self._ids: dict[int, int] = {}  # address of a live storage → id
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._initial: tuple[int, ...] = ()
        self._events: list[tuple[int, int, bool]] = []

    def start_step(self) -> None:
        """Begin the timeline here: what is alive now is its start."""
        self._initial = tuple(self._ids.values())
        self.storages = {key: self.storages[key] for key in self._initial}
        self._events.clear()
        self.call = 0

    def add(
        self,
        tensor: torch.Tensor,
        op: str = "",
        place: Place = NOWHERE,
        phase: str = "setup",
        owner: Owner = "temporaries",
        name: str = "",
    ) -> None:
        """Note a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._ids or storage.nbytes() == 0:
            return
        shape = tuple(tensor.shape)
        key = self._allocate(
            Storage(storage.nbytes(), shape, tensor.dtype, op, place, phase, name, owner)
        )
        self._ids[address] = key
        self._watches[key] = weakref.ref(storage, lambda _: self._release(address, key))

    @contextmanager
    def workspace(self, num_bytes: int, op: str, place: Place, phase: str) -> Iterator[None]:
        """Note memory that a call takes and gives back, beside what the block adds."""
        if num_bytes == 0:
            yield
            return
        name = f"workspace of {op}"
        key = self._allocate(Storage(num_bytes, (num_bytes,), torch.uint8, op, place, phase, name))
        yield
        self._events.append((self.call, key, False))

    def _allocate(self, storage: Storage) -> int:
        storage.num_bytes = -(-storage.num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        key = self._next_id
        self._next_id += 1
        self.storages[key] = storage
        self._events.append((self.call, key, True))
        return key

    def label(self, tensor: torch.Tensor, owner: Owner, name: str = "") -> None:
        """Charge a live tensor's storage to an owner."""
        key = self._ids.get(tensor.untyped_storage()._cdata)
        if key is not None:
            self.storages[key].owner = owner
            self.storages[key].name = name or self.storages[key].name

    def mark_module_output(self, output: Any) -> None:
        """Mark the storages that a module returns."""
        if isinstance(output, torch.Tensor):
            key = self._ids.get(output.untyped_storage()._cdata)
            if key is not None:
                self.storages[key].is_module_output = True
        elif isinstance(output, list | tuple):
            for part in output:
                self.mark_module_output(part)

    def end_forward(self) -> None:
        """Charge what the forward pass made and left alive to the activations."""
        for key in self._ids.values():
            if self.storages[key].phase == "forward":
                self.storages[key].owner = "activations"

    def timeline(self) -> Timeline:
        """Return the step as noted so far."""
        return Timeline(dict(self.storages), self._initial, tuple(self._events))

    def _release(self, address: int, key: int) -> None:
        self._ids.pop(address, None)
        self._watches.pop(key, None)
        self._events.append((self.call, key, False))


def describe(storages: Iterable[Storage], limit: int) -> list[dict[str, Any]]:
    """Return the first `limit` storages as rows of a report."""
    return [
        {
            "name": storage.name or storage.op,
            "module": storage.place.module,
            "shape": list(storage.shape),
            "dtype": str(storage.dtype).removeprefix("torch."),
            "bytes": storage.num_bytes,
            "owner": storage.owner,
            "line": storage.place.line,
        }
        for storage, _ in zip(storages, range(limit), strict=False)
    ]

"""Device memory that a call takes beyond what it was given and what it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nearlight.core.triton import Kernel
from nearlight.workbench.trial import Result

# Ops of these have no implementation in Python.
_OF_TORCH = ("aten", "prim", "prims")
_KEYS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CompositeExplicitAutograd)
_PEAK, _CURRENT = "requested_bytes.all.peak", "requested_bytes.all.current"


def extra_bytes(
    compute: Callable[[], Result], given: Iterable[Any], device: str
) -> tuple[int, bool]:
    """Return the peak of memory beyond the inputs, the outputs and the gradients.

    As asked for, not as the allocator rounds it up. On a GPU its allocator counts; on a CPU every
    storage that a torch op makes, inside ops that are written in Python as well.

    Args:
        compute: forward and backward; run twice, because some things are made once and kept.
        given: the inputs and the upstream gradients.
        device: "cpu" or "cuda".

    Returns:
        The bytes, and whether a result lies in what was given.
    """
    held = [value for value in given if isinstance(value, torch.Tensor)]
    compute()
    if device.partition(":")[0] == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()[_CURRENT]
        torch.cuda.reset_peak_memory_stats()
        result = compute()
        torch.cuda.synchronize()
        peak_bytes = torch.cuda.memory_stats()[_PEAK] - before
    else:
        with _Storages(held) as storages, _outside_kernels(storages):
            result = compute()
        peak_bytes = storages.peak_bytes
    kept_bytes, is_in_place = kept(result, held)
    return max(peak_bytes - kept_bytes, 0), is_in_place


def kept(result: Result, given: Iterable[torch.Tensor]) -> tuple[int, bool]:
    """Return the memory that results take, and whether some lie in tensors that were given."""
    # what is empty has no memory, and all of it one address
    results = [*result.outputs, *(g for g in result.gradients.values() if g is not None)]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    num_bytes = sum(size for place, size in storages.items() if place not in known)
    return num_bytes, any(size for place, size in storages.items() if place in known)


@contextmanager
def _outside_kernels(storages: _Storages) -> Iterator[None]:
    """Count nothing while a kernel is interpreted: what the interpreter makes is not the op's."""
    start = Kernel._start

    def uncounted(self: Kernel, *args: Any) -> Any:
        storages.is_paused = True
        try:
            return start(self, *args)
        finally:
            storages.is_paused = False

    with mock.patch.object(Kernel, "_start", uncounted):
        yield


class _Storages(TorchDispatchMode):
    """Counts the bytes of the storages that live, and their peak."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.is_paused = False
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        key = next((key for key in _KEYS if func.has_kernel_for_dispatch_key(key)), None)
        if key is None or func.namespace in _OF_TORCH:
            result = func(*args, **(kwargs or {}))
        else:  # an implementation in Python, with this mode still on
            with self:
                result = func._op_dk(key, *args, **(kwargs or {}))
        for tensor in tree_iter(result):
            # a scalar is a number for the host: on a CPU some checks cost nothing, and are made
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, num_bytes = storage._cdata, storage.nbytes()
        if self.is_paused or place in self._known or storage.device.type == "meta":
            return
        self._known.add(place)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, place, num_bytes)

    def _forget(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self.live_bytes -= num_bytes

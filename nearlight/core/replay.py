"""An op's launches, noted once for arguments of one kind and launched again for others of it.

A launcher of ours chooses a configuration, makes views, allocates and binds arguments: several
times the host cost of the launches. All of it follows from shapes, strides, dtypes, alignment and
numbers, so the third call of a kind only allocates and launches what the second was seen to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nearlight.core import tuned
from nearlight.core.direct import TENSORS
from nearlight.core.triton import Kernel

# Kinds of arguments an op remembers; where each call is of a new kind, none is worth noting.
MAX_KINDS = 4096
# Pointers of an address of this size are aligned for every access.
_ALIGNMENT = 16
_START = Kernel._start
_NUMBERS = (int, float, bool, str, type(None), tl.dtype)
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_hooks = triton.knobs.runtime
# One thread notes at a time: what two put in the place of `_start` would not come off again.
_noting = threading.Lock()


@dataclass(frozen=True)
class _Slot:
    """Where a tensor stands among a launch's arguments, and which memory it is.

    Attributes:
        at: its place among the arguments.
        base: index of the tensor whose memory it lies in: tensor arguments first, then what was
            allocated.
        offset_bytes: from where that tensor begins.
        size, stride, dtype: of the tensor itself.
    """

    at: int
    base: int
    offset_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Launch:
    """A launch as it was noted: everything but its pointers.

    Attributes:
        kernel: what was launched.
        start: launcher, function and metadata that Triton had compiled it to; None where it was
            interpreted.
        grid: three sizes.
        values: every argument in order, constants too; None where a tensor stands.
        slots: the tensors.
    """

    kernel: Kernel
    start: tuple[Any, Any, Any] | None
    grid: tuple[int, ...]
    values: Sequence[Any]
    slots: Sequence[_Slot]


@dataclass(frozen=True)
class Plan:
    """What an implementation does for arguments of one kind.

    Attributes:
        device: of all tensors.
        inputs: which arguments are tensors.
        allocations: size, stride and dtype of each.
        launches: in order.
        results: indices of the allocations that are returned.
        is_single: whether the result is a tensor and no tuple.
    """

    device: torch.device
    inputs: Sequence[int]
    allocations: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    launches: Sequence[_Launch]
    results: Sequence[int]
    is_single: bool

    def __call__(self, args: Sequence[Any]) -> Any:
        """Allocate and launch for arguments of this kind."""
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device=self.device)
            for size, stride, dtype in self.allocations
        ]
        bases = [*[args[index] for index in self.inputs], *made]
        if self.device.type == "cuda":
            self._launch(bases)
        else:
            self._interpret(bases)
        if self.is_single:
            return made[self.results[0]]
        return tuple([made[index] for index in self.results])

    def _launch(self, bases: Sequence[torch.Tensor]) -> None:
        pointers = [base.data_ptr() for base in bases]
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for launch in self.launches:
            assert launch.start is not None
            run, function, metadata = launch.start
            values = list(launch.values)
            for slot in launch.slots:
                values[slot.at] = pointers[slot.base] + slot.offset_bytes
            # As JITFunction.run ends; no hooks, and so nothing to tell them.
            run(*launch.grid, stream, function, metadata, None, None, None, *values)

    def _interpret(self, bases: Sequence[torch.Tensor]) -> None:
        for launch in self.launches:
            values = list(launch.values)
            for slot in launch.slots:
                base = bases[slot.base]
                storage = base.untyped_storage()
                start = base.data_ptr() - storage.data_ptr() + slot.offset_bytes
                values[slot.at] = torch.empty(0, dtype=slot.dtype).set_(
                    storage, start // slot.dtype.itemsize, slot.size, slot.stride
                )
            _START(launch.kernel, launch.grid, False, tuple(values), {})


class Replayed:
    """An implementation that notes its launches and repeats them.

    It must launch kernels of `core.triton.jit` alone, and what it allocates and launches must
    follow from the shapes, strides, dtypes and alignment of its tensors and the values of its
    other arguments; the first argument is a tensor. What does anything else to a tensor than to
    view it is never repeated.
    """

    # A CPU is no device to hurry on; the tests repeat launches there, too.
    devices = frozenset(("cuda",))

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self._implementation = implementation
        # None: called once; False: cannot be repeated.
        self._plans: dict[tuple[Any, ...], Plan | bool | None] = {}
        tuned.when_forgotten(self._plans.clear)

    def __call__(self, *args: Any) -> Any:
        """Do what the implementation does for these arguments."""
        device = args[0].device
        if device.type not in self.devices or not _is_free(device):
            return self._implementation(*args)
        kind = _kind(args)
        plan = self._plans.get(kind, True)
        if type(plan) is Plan:
            return plan(args)
        if plan is False:
            return self._implementation(*args)
        if plan is True:
            if len(self._plans) >= MAX_KINDS:
                self._plans.clear()
            self._plans[kind] = None
            return self._implementation(*args)
        if not _noting.acquire(blocking=False):
            return self._implementation(*args)  # while another thread notes
        try:
            results, noted = _noted(self._implementation, args)
        finally:
            _noting.release()
        self._plans[kind] = _plan(args, results, noted) or False
        return results


def _is_free(device: torch.device) -> bool:
    """Return whether nobody stands between a call and its launches."""
    return (
        Kernel._start is _START
        and (device.type == "cpu" or device.index == torch._C._cuda_getDevice())
        and not _hooks.launch_enter_hook.calls
        and not _hooks.launch_exit_hook.calls
    )


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a call's launches follow from; equal kinds have equal launches."""
    kind: list[Any] = []
    for value in args:
        if type(value) in TENSORS:
            alignment = value.data_ptr() % _ALIGNMENT
            kind += value.shape, value.stride(), value.dtype, value.get_device(), alignment
        else:
            kind.append(value or repr(value))  # 0.0 and -0.0 compare equal
    return tuple(kind)


class _Noted(TorchDispatchMode):
    """What an implementation does: allocations, launches, and whether that is all."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.launched: list[tuple[Kernel, Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.is_all = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATES:
            self.allocated.append(result)
        elif not function.is_view:
            self.is_all = False
        return result


def _noted(implementation: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, _Noted]:
    noted, thread = _Noted(), threading.get_ident()

    def note(
        self: Kernel, grid: Any, warmup: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with _disable_current_modes():  # the interpreter computes on tensors
            compiled = _START(self, grid, warmup, args, kwargs)
        if threading.get_ident() == thread:
            noted.launched.append((self, compiled, grid, args, kwargs))
        return compiled

    with mock.patch.object(Kernel, "_start", note), noted:
        return implementation(*args), noted


def _plan(args: Sequence[Any], results: Any, noted: _Noted) -> Plan | None:
    """Return the plan of a call, or None where repeating it might not do the same."""
    inputs = [index for index, value in enumerate(args) if type(value) in TENSORS]
    given = [args[index] for index in inputs]
    is_single = isinstance(results, torch.Tensor)
    returned = [results] if is_single else results
    places = [i for r in returned for i, made in enumerate(noted.allocated) if _is_same(made, r)]
    if not noted.is_all or not noted.launched or len(places) != len(returned):
        return None
    launches = []
    for each in noted.launched:
        launch = _launch_of(*each, [*given, *noted.allocated])
        if launch is None:
            return None
        launches.append(launch)
    shapes = [(tuple(made.shape), made.stride(), made.dtype) for made in noted.allocated]
    return Plan(args[0].device, inputs, shapes, launches, places, is_single)


def _is_same(made: torch.Tensor, returned: torch.Tensor) -> bool:
    """Return whether two tensors are one, for torch may have put another around its memory."""
    return made.untyped_storage()._cdata == returned.untyped_storage()._cdata and (
        (made.shape, made.stride(), made.data_ptr(), made.dtype)
        == (returned.shape, returned.stride(), returned.data_ptr(), returned.dtype)
    )


def _launch_of(
    kernel: Kernel,
    compiled: Any,
    grid: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bases: Sequence[torch.Tensor],
) -> _Launch | None:
    bound = {p.name: p.default for p in kernel.params if p.has_default}
    bound |= dict(zip(kernel.arg_names, args, strict=False))
    bound |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    values, slots = [bound[name] for name in kernel.arg_names], []
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found = _place(value, bases)
            if found is None:
                return None
            slots.append(_Slot(at, *found, tuple(value.shape), value.stride(), value.dtype))
            values[at] = None
        elif not isinstance(value, _NUMBERS):
            return None
    sizes = tuple(map(int, grid(bound) if callable(grid) else grid))
    start = None
    if compiled is not None:
        start = compiled.run, compiled.function, compiled.packed_metadata
    return _Launch(kernel, start, (*sizes, 1, 1)[:3], values, slots)


def _place(tensor: torch.Tensor, bases: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return in which base a tensor lies and how many bytes from its start, if that is certain.

    Arguments may share their memory in one call and not in the next: then only the argument
    itself, or one like it at its address, is certain.
    """
    for index, base in enumerate(bases):
        if tensor is base:
            return index, 0
    start = tensor.untyped_storage().data_ptr()
    within = [i for i, base in enumerate(bases) if base.untyped_storage().data_ptr() == start]
    if len(within) > 1:
        address, size = tensor.data_ptr(), tensor.numel()
        within = [i for i in within if bases[i].data_ptr() == address and bases[i].numel() == size]
    if len(within) != 1 or not start:
        return None
    return within[0], tensor.data_ptr() - bases[within[0]].data_ptr()

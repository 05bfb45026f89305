"""A Triton kernel launched again, at half the host cost.

What Triton finds out at every launch depends only on the kinds of the arguments: a tensor's dtype
and alignment, whether an integer is 1, a multiple of 16, or of 64 bits, and each constant. So the
compiled kernel is kept by these, and launched as Triton's own `JITFunction.run` launches it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton import knobs

_runtime, _compilation = knobs.runtime, knobs.compilation


class Relaunch:
    """The compiled kernels of one Triton kernel, by the kinds of the arguments.

    Args:
        kernel: a `triton.runtime.jit.JITFunction`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        parameters = list(kernel.params)
        self._is_constant = [parameter.is_constexpr for parameter in parameters]
        # A launch option is a constant as well.
        self._runtime_names = {p.name for p in parameters if not p.is_constexpr}
        self._names = [parameter.name for parameter in parameters]
        self._defaults = {p.name: p.default for p in parameters if p.has_default}
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def key(
        self, device: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return what decides on the compiled kernel; None where only Triton's own way is right.

        Args:
            device: index of the GPU.
            args: of the launch, in order.
            kwargs: the others, and launch options.
        """
        if (
            _runtime.launch_enter_hook.calls
            or _runtime.launch_exit_hook.calls
            or _runtime.add_stages_inspection_hook is not None
            or self._kernel.pre_run_hooks
        ):
            return None
        source = self._kernel.hash
        kinds: list[Any] = [device, source, _runtime.debug, _compilation.instrumentation_mode]
        for value, is_constant in zip(args, self._is_constant, strict=False):
            if not is_constant and (value := _kind(value)) is None:
                return None
            kinds.append(value)
        if self._runtime_names.isdisjoint(kwargs):
            return *kinds, *kwargs, *kwargs.values()
        for name, value in kwargs.items():
            if name in self._runtime_names and (value := _kind(value)) is None:
                return None
            kinds += name, value
        return tuple(kinds)

    def find(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return what `launch` needs; None if there was no such launch, or a global has changed."""
        try:
            found = self._compiled.get(key)
        except TypeError:  # a constant such as a list
            return None
        for (name, _), (value, namespace) in self._kernel.used_global_vals.items():
            if namespace.get(name, _compilation) != value:
                return None  # Triton has its own words for it
        return found

    def keep(self, key: tuple[Any, ...], compiled: Any, num_args: int) -> None:
        """Keep what Triton compiled for a launch with so many positional arguments."""
        parts = compiled, compiled.run, compiled.function, compiled.packed_metadata
        with contextlib.suppress(TypeError):
            self._compiled[key] = *parts, self._names[num_args:]

    def launch(
        self,
        found: tuple[Any, ...],
        device: int,
        grid: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Launch on the current device, which is `device`, and return the compiled kernel."""
        compiled, launcher, function, packed, rest = found
        if rest:
            given = {**self._defaults, **kwargs} if self._defaults else kwargs
            args = (*args, *[given[name] for name in rest])
        if callable(grid):
            grid = grid(dict(zip(self._names, args, strict=True)))
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        launcher(x, y, z, stream, function, packed, None, None, None, *args)
        return compiled


def _kind(value: Any) -> Any:
    """Return what Triton specialises on, or more: a tensor's dtype, an integer's class, None."""
    if isinstance(value, torch.Tensor):
        return value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,)
    if value is None:
        return "None"
    kind = type(value)
    if kind is int:
        if value == 1:
            return "1"
        if value.bit_length() < 32:  # −2³¹ is one of them, and counts as longer
            return 16 if value & 15 == 0 else 32
        return value & 15 == 0, value < 2**63, value == -(2**31)
    return kind if kind is float or kind is bool else None

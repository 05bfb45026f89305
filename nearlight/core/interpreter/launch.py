"""Run the programs of a launch, with arguments of the types that a compiled kernel sees."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction, mangle_type

from nearlight.core.interpreter.arithmetic import encode
from nearlight.core.interpreter.patches import patched
from nearlight.core.interpreter.reductions import make_tensor
from nearlight.core.interpreter.source import rewritten
from nearlight.core.interpreter.types import builder
from nearlight.core.launch import misfit

# Held while `tl` is patched, and by everything that compiles.
lock = threading.RLock()

_pointer_types: dict[torch.dtype, Any] = {}


def launch(
    kernel: JITFunction, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run every program of `grid` one after the other.

    Args:
        kernel: the kernel.
        grid: one to three sizes, or a function of the bound arguments.
        args: positional arguments of the kernel.
        kwargs: keyword arguments of the kernel; launch options are left out.

    Raises:
        ValueError: a tensor is not on the CPU, or the grid is larger than a GPU allows.
        TypeError: an argument is missing or of a type that Triton does not take.
    """
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    sizes = _grid(grid(bound.arguments) if callable(grid) else grid)
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    with lock, patched(), np.errstate(all="ignore"):
        values = {p.name: _argument(bound.arguments[p.name], p) for p in kernel.params}
        function = rewritten(kernel)
        builder.grid_dim = sizes
        for program in itertools.product(*map(range, sizes)):
            builder.grid_idx = program
            try:
                function(**values)
            except Exception as error:
                error.add_note(f"while interpreting {kernel.__name__}, program {program}")
                raise


def _grid(grid: Any) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in grid)
    if reason := misfit(sizes):
        raise ValueError(reason)
    return sizes + (1,) * (3 - len(sizes))


def _scalar(value: Any, name: str) -> tl.tensor:
    """Make a scalar of the type named as in a signature ("i32", "fp32", "u1")."""
    dtype = tl.str_to_ty(name, None)
    return make_tensor(encode(np.array(value), dtype))


def _argument(value: Any, param: Any) -> Any:
    """Give an argument the type that a compiled kernel would see."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if param.is_constexpr or value is None or isinstance(value, (tl.dtype, JITFunction)):
        return value
    if isinstance(value, torch.Tensor):
        return _pointer(value, param.name)
    if isinstance(value, tuple):
        items = [_argument(item, param) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, (bool, int)):
        is_typed = bool(param.annotation_type) or param.do_not_specialize
        if value == 1 and not isinstance(value, bool) and not is_typed:
            return value  # specialised: a compiled kernel sees the constant
        return _scalar(value, param.annotation_type or mangle_type(value))
    if isinstance(value, float):
        return _scalar(value, param.annotation_type or "fp32")
    if isinstance(value, stock.TensorDescriptor):
        return stock._implicit_cvt(value)
    raise TypeError(
        f"argument `{param.name}` is a {type(value).__name__}; a kernel takes tensors, int, float, "
        "bool, None, tuples of these and tensor descriptors"
    )


def _pointer(tensor: torch.Tensor, name: str) -> tl.tensor:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"argument `{name}` is on {tensor.device} but others are on the CPU: give all tensors "
            "of a launch one device"
        )
    if tensor.dtype not in _pointer_types:
        _pointer_types[tensor.dtype] = tl.str_to_ty(mangle_type(tensor), None)
    dtype = _pointer_types[tensor.dtype]
    return tl.tensor(TensorHandle(np.array([tensor.data_ptr()], np.uint64), dtype), dtype)

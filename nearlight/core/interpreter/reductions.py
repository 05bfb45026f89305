"""Reductions and scans of an interpreted kernel, by numpy or by the combine function.

The combine function is called log2(n) times on whole slices, not once per element, so that one of
the user's own is as fast as a built-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from nearlight.core.interpreter.arithmetic import Array, decode, encode

Call = Callable[[Any], Callable[..., Any]]


def make_tensor(handle: TensorHandle) -> tl.tensor:
    """Wrap a handle as a scalar (one element, no dimension) or as a block of its shape."""
    scalar = handle.dtype.scalar
    if handle.data.ndim == 0:
        return tl.tensor(TensorHandle(handle.data.reshape(1), scalar), scalar)
    return tl.tensor(handle, tl.block_type(scalar, list(handle.data.shape)))


def _wrap(data: Array, dtype: tl.dtype) -> tl.tensor:
    return make_tensor(TensorHandle(np.asarray(data, order="C"), dtype))


def _combine(function: Callable[..., Any], left: list[Any], right: list[Any]) -> list[Any]:
    """Combine two lists of tensors; the results keep the left one's types."""
    results = function(*left, *right)
    results = list(results) if isinstance(results, (tuple, tl.tuple)) else [results]
    shape = left[0].handle.data.shape
    return [
        _wrap(np.broadcast_to(encode(decode(result.handle), like.dtype).data, shape), like.dtype)
        for result, like in zip(results, left, strict=True)
    ]


def _fast_reduce(combine: Any, data: Array, axis: int) -> Array | None:
    """Reduce natively where numpy does what the combine function does; None elsewhere."""
    if data.dtype == np.float16 and combine is tl.standard._sum_combine:
        return None  # rounds after each step on a GPU, and so must we
    if combine is tl.standard._sum_combine:
        return np.asarray(np.sum(data, axis=axis, dtype=data.dtype))
    if combine is tl.standard._elementwise_max:
        return np.asarray(np.fmax.reduce(data, axis=axis))
    if combine is tl.standard._elementwise_min:
        return np.asarray(np.fmin.reduce(data, axis=axis))
    return None


def reduce(tensors: Any, axis: int | None, combine: Any, keep_dims: bool, call: Call) -> Any:
    """Reduce a tensor, or a tuple of tensors together, along `axis` (None: all of them).

    `call` makes a callable of the combine function.
    """
    is_one = isinstance(tensors, tl.tensor)
    group = [tensors] if is_one else list(tensors)
    rank = group[0].handle.data.ndim
    data = [t.handle.data.reshape(-1) if axis is None else t.handle.data for t in group]
    dim = 0 if axis is None else _checked_axis(axis, rank)
    dtypes = [t.dtype for t in group]
    fast = None
    if is_one and dtypes[0].name in ("int8", "int16", "int32", "int64", "fp16", "fp32", "fp64"):
        fast = _fast_reduce(combine, data[0], dim)
    if fast is not None:
        results = [fast]
    else:
        parts = [np.moveaxis(d, dim, -1) for d in data]
        while parts[0].shape[-1] > 1:
            left = [_wrap(p[..., 0::2], t) for p, t in zip(parts, dtypes, strict=True)]
            right = [_wrap(p[..., 1::2], t) for p, t in zip(parts, dtypes, strict=True)]
            parts = [t.handle.data for t in _combine(call(combine), left, right)]
        results = [p[..., 0] for p in parts]
    if keep_dims:
        shape = (1,) * rank if axis is None else None
        results = [r.reshape(shape) if shape else np.expand_dims(r, dim) for r in results]
    wrapped = tuple(_wrap(r, t) for r, t in zip(results, dtypes, strict=True))
    return wrapped[0] if is_one else wrapped


def scan(tensors: Any, axis: int, combine: Any, reverse: bool, call: Call) -> Any:
    """Scan a tensor, or a tuple of tensors together, along `axis`, in log2(n) calls."""
    is_one = isinstance(tensors, tl.tensor)
    group = [tensors] if is_one else list(tensors)
    dim = _checked_axis(axis, group[0].handle.data.ndim)
    dtypes = [t.dtype for t in group]
    parts = [np.moveaxis(t.handle.data, dim, -1) for t in group]
    if reverse:
        parts = [p[..., ::-1] for p in parts]
    n = parts[0].shape[-1]
    if is_one and combine is tl.standard._sum_combine and dtypes[0].name not in ("fp16", "bf16"):
        parts = [np.cumsum(parts[0], axis=-1, dtype=parts[0].dtype)]
        n = 1
    distance = 1
    while distance < n:
        left = [_wrap(np.roll(p, distance, -1), t) for p, t in zip(parts, dtypes, strict=True)]
        right = [_wrap(p, t) for p, t in zip(parts, dtypes, strict=True)]
        has_left = np.arange(n) >= distance
        combined = _combine(call(combine), left, right)
        parts = [np.where(has_left, c.handle.data, p) for c, p in zip(combined, parts, strict=True)]
        distance *= 2
    if reverse:
        parts = [p[..., ::-1] for p in parts]
    wrapped = tuple(_wrap(np.moveaxis(p, -1, dim), t) for p, t in zip(parts, dtypes, strict=True))
    return wrapped[0] if is_one else wrapped


def _checked_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis={axis} of a block with {rank} dimensions")
    return axis % rank

"""Replace `tl` by its interpreted self for the time of a launch, and put everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from nearlight.core.interpreter import reductions, source, types
from nearlight.core.interpreter.arithmetic import numpy_dtype

_MISSING = object()
_REFLECTED = "add sub mul truediv floordiv mod and or xor lshift rshift lt le gt ge eq ne".split()


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **hints: Any) -> Any:
    axis = axis.value if isinstance(axis, tl.constexpr) else axis
    keep_dims = keep_dims.value if isinstance(keep_dims, tl.constexpr) else keep_dims
    return reductions.reduce(input, axis, combine_fn, bool(keep_dims), source.callable_of)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **hints: Any) -> Any:
    axis = axis.value if isinstance(axis, tl.constexpr) else axis
    reverse = reverse.value if isinstance(reverse, tl.constexpr) else reverse
    return reductions.scan(input, axis, combine_fn, bool(reverse), source.callable_of)


def _deferring(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tensor on the right compute with a constant, which would swallow it."""
    return lambda self, other: (
        NotImplemented if isinstance(other, tl.tensor) else operation(self, other)
    )


def _bind(member: JITFunction) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: source.rewritten(member)(tensor, *args, **kwargs)


def _language_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, name, value) for all of `tl`: Triton's own patches, then ours."""
    scope = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        names = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
        patches = [(owner, name, vars(owner)[name]) for owner, name in names.values()]
    finally:
        scope.restore()
    yield from patches
    for language in (tl, tl.core):
        yield language, "range", source.loop_range
        yield language, "static_range", source.static_range
        yield language, "reduce", _reduce
        yield language, "associative_scan", _scan
    yield tl.tensor, "reduce", _reduce
    yield tl.tensor, "associative_scan", _scan
    yield tl.tensor, "__index__", source.as_int
    # x.sum() finds a JITFunction on the class, which does not bind
    for name, member in vars(tl.tensor).items():
        if isinstance(member, JITFunction):
            yield tl.tensor, name, _bind(member)
    for name in _REFLECTED:
        yield tl.constexpr, f"__{name}__", _deferring(vars(tl.constexpr)[f"__{name}__"])
    yield from _extra_patches()


def _extra_patches() -> Iterator[tuple[ModuleType, str, Any]]:
    from triton.language.extra import cuda, libdevice

    for module in (cuda, cuda.libdevice):
        for name, member in vars(module).items():
            if tl.core.is_builtin(member):
                yield module, name, source.with_semantic(member)
                if module is cuda.libdevice and hasattr(libdevice, name):
                    yield libdevice, name, source.with_semantic(member)


_patches: list[tuple[Any, str, Any]] = []


@contextmanager
def patched() -> Iterator[None]:
    """Replace `tl` and the interpreter's globals; put back what was there, also on errors."""
    if not _patches:
        _patches.extend(
            [
                (stock, "interpreter_builder", types.builder),
                (stock, "interpreter_semantic", types.semantic),
                (stock, "TritonSemantic", types.Semantic),  # triton 3.6 makes its own per call
                (stock, "_get_np_dtype", numpy_dtype),
                (tl.block_type, "__init__", types.init_block_type),
                (tl.tensor, "__init__", types.init_tensor),
                (JITFunction, "__call__", _call),
                (stock.InterpretedFunction, "__call__", _call),
            ]
        )
        with _replaced(_patches):
            language = list(_language_patches())
        _patches.extend(language)
    with _replaced(_patches):
        yield


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a helper, also one that was decorated while TRITON_INTERPRET was set."""
    return source.rewritten(function)(*args, **kwargs)


@contextmanager
def _replaced(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _MISSING:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)

"""Types of an interpreted kernel, with every shape made once.

Making `block_type` and `tensor` objects takes 40% of the time of a small interpreted program:
each wraps every size of its shape anew. A kernel knows few shapes, so they are kept.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic

from nearlight.core.interpreter.arithmetic import Builder

_make_block_type = tl.block_type.__init__


class Semantic(TritonSemantic):
    """Triton's typing rules with a short way for operands of one shape."""

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Return both operands with one shape; a kept shape is the same object."""
        is_same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if is_same else super().broadcast_impl_value(lhs, rhs)

    def load(self, ptr: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        """Load; Triton asks for the truth of `other`, which is False of a single 0."""
        builder.has_other = other is not None
        try:
            return super().load(ptr, mask, other, *rest, **named)
        finally:
            builder.has_other = False


@cache
def _block_shape(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """Return a block type's checked shape, its number of elements and its name's first part."""
    block = tl.block_type.__new__(tl.block_type)
    _make_block_type(block, tl.int1, list(shape))
    return block.shape, block.numel, f"<{block.shape}, "


@cache
def _tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(prod(shape))


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Stand in for `tl.block_type.__init__`."""
    shape = shape.value if isinstance(shape, tl.constexpr) else shape
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.element_ty = element_ty
    self.shape, self.numel, name = _block_shape(sizes)
    self.name = f"{name}{element_ty.name}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Stand in for `tl.tensor.__init__`."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _tensor_shape(tuple(type.shape.values) if type.is_block() else ())


builder = Builder()
semantic = Semantic(builder)

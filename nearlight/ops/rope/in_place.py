"""RoPE in place: what it refuses, its torch op, and what autograd is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from nearlight.core.cost import Cost
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator_pipe
from nearlight.ops.rope.registration import ARGUMENTS, Pair, angle_bytes, backward_op, launch


def refuse_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> None:
    """Raise ValueError where q or k cannot be written, before anything is."""
    if torch.compiler.is_compiling():
        return  # traced tensors have no address; torch has the last word on what it writes then
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "rope: in_place=True and cos or sin requires a gradient, which needs the q and k that "
            "are written over; detach them, or call without in_place"
        )
    turned = ("q", q), ("k", k)
    for name, x in turned:
        base = x if x._base is None else x._base
        if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
            raise ValueError(
                f"rope: in_place=True and {name} is a leaf that requires a gradient, or a view of "
                "one: its values are the user's; call without in_place, or on a clone"
            )
        if _may_overlap_itself(x):
            raise ValueError(
                f"rope: in_place=True and entries of {name}, strides {x.stride()} for "
                f"{tuple(x.shape)}, share memory; call without in_place, or on {name}.contiguous()"
            )
    read = ("cos", cos), ("sin", sin), ("position_ids", position_ids)
    for (name, x), (other, tensor) in (turned, *product(turned, read)):
        if tensor is not None and _may_share_memory(x, tensor):
            raise ValueError(
                f"rope: in_place=True and {name} shares memory with {other}; call without "
                "in_place, or on a clone of one of them"
            )


def _may_overlap_itself(x: torch.Tensor) -> bool:
    """Return False where no two entries share memory; strides that do not nest count as sharing."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return x.numel() > 0
            reach += stride * (size - 1)
    return False


def _may_share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return False where no byte of one is of the other, as in parts of one packed projection."""
    if not a.numel() or not b.numel():
        return False
    strides_a, strides_b = (
        [(s * x.element_size(), n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
        for x in (a, b)
    )

    def bytes_below(period: float, strides: list[tuple[int, int]], x: torch.Tensor) -> int:
        return sum(s * (n - 1) for s, n in strides if s < period) + x.element_size()

    start_a, start_b, everything = a.data_ptr(), b.data_ptr(), float("inf")
    if start_a + bytes_below(everything, strides_a, a) <= start_b:
        return False
    if start_b + bytes_below(everything, strides_b, b) <= start_a:
        return False
    # Apart within each period, where all that is wider than it is a multiple of it.
    for period in {s for s, _ in (*strides_a, *strides_b) if s}:
        if any(s > period and s % period for s, _ in (*strides_a, *strides_b)):
            continue
        gap = (start_b - start_a) % period
        length_a = bytes_below(period, strides_a, a)
        if length_a <= gap and gap + bytes_below(period, strides_b, b) <= period:
            return False
    return True


class _Turned(torch.autograd.Function):
    """The node of a tensor that is turned in place: its gradient is turned back.

    It is made before the kernel writes, so that what autograd refuses stays as it is. One for q and
    one for k: torch lets a node write into one view only.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # the base class takes anything
        ctx: Any, x: torch.Tensor, tables: Sequence[torch.Tensor | None], options: Any
    ) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(*tables)
        ctx.options = options
        return x

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:  # type: ignore[override]  # as above
        no_heads = dx.narrow(ctx.options[-1], 0, 0)
        return backward_op(dx, no_heads, *ctx.saved_tensors, *ctx.options)[0], None, None


def turn_in_place(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Pair:
    """Turn q and k where they lie, in one launch, and return them; arguments as the op's."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        q, k = (_Turned.apply(x, rest[:3], rest[3:]) for x in (q, k))  # type: ignore[no-untyped-call]  # torch's
    with torch.no_grad():
        _in_place_op(q, k, *rest)
    return q, k


def _launch(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
    launch(False, q, k, *rest, is_in_place=True)
    # What autograd saved before is seen to have changed.
    torch.autograd.graph.increment_version([x for x in (q, k) if not x.is_inference()])


def _cost(args: Sequence[Any], kwargs: Any, outputs: Any) -> Cost:
    """Count what turns of q and k, read and written once, and the angles read."""
    q, k, cos, sin, position_ids, _, rotary_dim, _ = args
    turned = sum(x.numel() // max(x.shape[3], 1) * rotary_dim for x in (q, k))
    turned_bytes = turned * q.element_size()
    return Cost(
        flops={accumulator_pipe(q.dtype): 3 * turned},
        bytes_read=turned_bytes + angle_bytes(cos, sin, position_ids),
        bytes_written=turned_bytes,
    )


_in_place_op: Callable[..., None] = register_op(
    f"rope_(Tensor(a!) q, Tensor(b!) k, {ARGUMENTS}) -> ()",
    _launch,
    fake=lambda *args: None,
    cost=_cost,
)

"""`register_op`: one torch op in full: schema, implementation, shapes, gradient, cost and tags.

`torch.library.Library` instead of `custom_op`: half the host cost per call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain, count
from typing import Any, NoReturn

import torch

from nearlight.core.cost import Formula, register_cost
from nearlight.core.direct import direct
from nearlight.core.launch import is_describing
from nearlight.core.replay import Replayed

# One library per op by qualified name, and the file that defined it.
_libraries: dict[str, tuple[torch.library.Library, str]] = {}
# What runs on tensors, by the same name: errors of torch's own do not name it.
implementations: dict[str, Callable[..., Any]] = {}
# Inside `sparing_others`: what its end puts back.
_taken: ContextVar[ExitStack | None] = ContextVar("taken", default=None)


@contextmanager
def sparing_others() -> Iterator[None]:
    """Let a file be read beside others: inside the block an op whose name is taken gets another.

    Torch knows one op by a name, and an op that is defined again is lost to whoever holds it. A
    file may call its op by that name, so until the block ends `torch.ops` finds the new one by it.
    """
    with ExitStack() as taken:
        taken.callback(_taken.reset, _taken.set(taken))
        yield


def register_op(
    schema: str,
    implementation: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    cost: Formula,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    is_static: bool = False,
) -> Callable[..., Any]:
    """Define a torch op and return what to call; a file run again replaces its former ops.

    Args:
        schema: "double_fwd(Tensor x) -> Tensor", in torch's schema language; or the name alone,
            where the annotations of `implementation` say the rest and it writes into no argument.
            Its namespace is `nearlight`, or another that stands before it ("mine::double_fwd").
        implementation: what runs on CPU and CUDA tensors; without a forward-mode derivative, of
            which torch tells no op: `backend.use_triton` keeps calls away from it there.
        fake: takes the same arguments and returns empty outputs of the right shape, dtype, strides.
        cost: `(args, kwargs, outputs) -> Cost` with fewest bytes.
        backward: `(ctx, *upstream) -> a gradient or None per argument`; where it is left out, as
            for a backward op, a gradient is refused: torch alone would answer 0 in silence.
        save: `(ctx, inputs, output)`, keeps what `backward` needs.
        is_static: whether the implementation's launches may be repeated without it for arguments
            of one kind; `replay.Replayed` says what that asks of it.

    Raises:
        ValueError: another file has defined an op of this name.

    Example:
        >>> double = register_op(
        ...     "double_fwd(Tensor x) -> Tensor",
        ...     lambda x: 2 * x,
        ...     fake=torch.empty_like,
        ...     cost=lambda args, kwargs, out: Cost(),
        ...     backward=lambda ctx, dout: 2 * dout,
        ... )  # doctest: +SKIP
    """
    if "(" not in schema:
        schema = torch.library.infer_schema(implementation, mutates_args=(), op_name=schema)
    name = schema.partition("(")[0].strip()
    namespace, _, name = name.rpartition("::")
    definition = schema.removeprefix(f"{namespace}::")
    asked = namespace or "nearlight"
    namespace = _spared(asked, name)
    qualified = f"{namespace}::{name}"
    file = sys._getframe(1).f_code.co_filename
    if qualified in _libraries:
        former, other = _libraries[qualified]
        if other != file:
            raise ValueError(
                f"{qualified} is defined in {other} and again in {file}; torch knows one op by a "
                "name: give one of them another namespace"
            )
        former._destroy()
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries[qualified] = library, file
    implementations[qualified] = implementation
    library.define(definition, tags=(torch.Tag.pt2_compliant_tag,))
    op: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
    implementation = _counted(implementation, op)
    for device in ("CPU", "CUDA"):
        library.impl(name, implementation, device)

    def shapes(*args: Any, **kwargs: Any) -> Any:
        # Where launches on meta tensors are described, an op launches there as its kernels would.
        return (implementation if is_describing() else fake)(*args, **kwargs)

    torch.library.register_fake(qualified, fake if fake is None else shapes, lib=library)
    call = op
    if not op._schema.is_mutable:  # type: ignore[attr-defined]  # an OpOverload; others take no formula
        quick = Replayed(implementation) if is_static else implementation
        call = direct(op, quick, backward, save)
        if backward is None:

            def backward(ctx: Any, *upstream: Any) -> NoReturn:
                refuse_double_backward(name.removesuffix("_bwd"))

        torch.library.register_autograd(qualified, backward, setup_context=save, lib=library)
    register_cost(qualified)(cost)
    if namespace != asked:
        _take_name(asked, name, getattr(getattr(torch.ops, namespace), name))
    return call


def _counted(implementation: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Return the implementation, held to the number of results that its schema says.

    Torch takes more than that without a word, and crashes later.
    """
    num_returns = len(op._schema.returns)
    if num_returns < 2:
        return implementation

    @functools.wraps(implementation)
    def counted(*args: Any, **kwargs: Any) -> Any:
        results = implementation(*args, **kwargs)
        if isinstance(results, tuple | list) and len(results) != num_returns:
            name = getattr(implementation, "__name__", op._schema.name)
            raise TypeError(
                f"{name} returned {len(results)} results; the schema of {op._schema.name} says "
                f"{num_returns}: return as many, or change it"
            )
        return results

    return counted


def _spared(namespace: str, name: str) -> str:
    """Return the namespace, or inside `sparing_others` one like it in which the name is free."""
    if _taken.get() is None:
        return namespace
    others = chain([namespace], (f"{namespace}_{number}" for number in count(2)))
    return next(other for other in others if f"{other}::{name}" not in _libraries)


def _take_name(namespace: str, name: str, packet: Any) -> None:
    """Let `torch.ops.<namespace>.<name>` find another op until `sparing_others` ends."""
    ops, taken = getattr(torch.ops, namespace), _taken.get()
    assert taken is not None
    taken.callback(setattr, ops, name, getattr(ops, name))
    setattr(ops, name, packet)


def refuse_double_backward(op: str) -> NoReturn:
    """Raise RuntimeError: the op's gradient cannot be differentiated."""
    raise RuntimeError(
        f"{op} has no gradient of its gradient; use backend='reference' where one is needed"
    )

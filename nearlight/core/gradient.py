"""A torch op's gradient, at less than half the host cost of `torch.library.register_autograd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.utils import fill_defaults, is_tensorlist_like_type

_BELOW = torch._C._after_autograd_keyset


def register_gradient(
    op: Any,
    library: torch.library.Library,
    save: Callable[..., None] | None,
    backward: Callable[..., Any],
    implementation: Callable[..., Any],
) -> Any:
    """Give a torch op a gradient and return the autograd.Function that has it.

    Its last argument is the key set with which torch's dispatcher goes on, or None for the
    implementation itself. Of an op with lists of tensors there is none to return.

    Args:
        op: an OpOverload.
        library: defines it.
        save: `(ctx, inputs, output)`, keeps what `backward` needs.
        backward: `(ctx, *upstream) -> a gradient or None per argument`.
        implementation: the op's kernel for CPU and CUDA tensors.
    """
    arguments, returns = op._schema.arguments, op._schema.returns
    has_lists = any(is_tensorlist_like_type(each.type) for each in (*arguments, *returns))
    if has_lists or any(each.kwarg_only for each in arguments):
        # An autograd.Function sees no tensor in a list; torch's own way, which unpacks them, does.
        torch.library.register_autograd(op, backward, setup_context=save, lib=library)
        return None

    def forward(ctx: Any, *args_and_keyset: Any) -> Any:
        *args, keyset = args_and_keyset
        if keyset is None:
            output = implementation(*args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = op.redispatch(keyset, *args)
        if save is not None:
            if len(args) < len(arguments):  # torch leaves out what equals its default
                args = fill_defaults(op._schema, args, {})[0]
            save(ctx, tuple(args), output)
        return output

    def differentiate(ctx: Any, *upstream: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:-1]
        try:
            gradients = backward(ctx, *upstream)
        finally:
            ctx.needs_input_grad = needs
        return (*gradients, None) if isinstance(gradients, tuple) else (gradients, None)

    function: Any = type(
        f"{op._schema.name.replace('::', '_')}_gradient",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(differentiate)},
    )

    def autograd(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(*args, keyset & _BELOW)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _BELOW, *args)

    library.impl(op, autograd, "Autograd", with_keyset=True)
    return function

"""Hooks on modules that a fused op passes by: they count, so the op has to give way to them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere


def hook_in_the_way(module: nn.Module, *, is_called: bool) -> str:
    """Return the kind of a hook that would not see the true call of `module`, "" if there is none.

    Hooks for all modules count too. nearlight's own do not: they only look, and what they have to
    see is the patched model as it runs.

    Args:
        module: a module whose work a fused op does.
        is_called: it is called all the same and only its result is not the true one, so that its
            forward-pre hooks run as ever.
    """
    for kind, hooks in (
        ("forward", module._forward_hooks),
        ("backward", module._backward_hooks),
        ("backward-pre", module._backward_pre_hooks),
        ("global forward", everywhere._global_forward_hooks),
        ("global backward", everywhere._global_backward_hooks),
        ("global backward-pre", everywhere._global_backward_pre_hooks),
    ):
        if _any_foreign(hooks):
            return kind
    if is_called:
        return ""
    if _any_foreign(module._forward_pre_hooks):
        return "forward-pre"
    return "global forward-pre" if _any_foreign(everywhere._global_forward_pre_hooks) else ""


def _any_foreign(hooks: Any) -> bool:
    if not hooks:  # as on nearly every call
        return False
    return any(
        not str(getattr(hook, "__module__", "")).startswith("nearlight.") for hook in hooks.values()
    )

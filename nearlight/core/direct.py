"""An op called on plain tensors without torch's dispatcher, which costs more than a launch.

The dispatcher and the Python kernels behind it are needed where a call means more than its kernel:
under a mode, a transform, a tracer, a compiler or a profiler, and for tensors that are more than
strided memory. Whatever that is, torch says it in dispatch keys, and only the sets of keys of a
plain tensor and of a plain thread are let through here: what is unknown takes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_C = torch._C
_DEVICES = ("CPU", "CUDA")
# Exactly these: a subclass may mean anything.
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
# What Python passes for a type of the schema, exactly: an int for a float would be converted.
_TYPES: dict[str, frozenset[type]] = {
    "Tensor": TENSORS,
    "Optional[Tensor]": TENSORS | {type(None)},
    "float": frozenset((float,)),
    "Optional[float]": frozenset((float, type(None))),
    "int": frozenset((int, torch.dtype)),  # a dtype counts as an int there
    "Optional[int]": frozenset((int, torch.dtype, type(None))),
    "bool": frozenset((bool,)),
    "str": frozenset((str,)),
}


def _keys(*names: str) -> int:
    """Return a set of dispatch keys as torch's own sets compare: by their bits."""
    found = _C.DispatchKeySet(_C._dispatch_key_parse(names[0]))
    for name in names[1:]:
        found = found | _C.DispatchKeySet(_C._dispatch_key_parse(name))
    return int(found.raw_repr())


# A tensor that needs no gradient has the keys of autograd, too.
_PLAIN = frozenset(
    _keys(device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}")
    for device in _DEVICES
)
_INCLUDED = _keys("BackendSelect", "ADInplaceOrView")
# What a call goes through, one of which is left out below autograd. Autocast is not among them:
# our ops have no kernel for it.
_PASSED = _keys("ADInplaceOrView", *(way + kind for way in ("", "Autograd") for kind in _DEVICES))


def direct(
    op: Any,
    implementation: Callable[..., Any],
    backward: Callable[..., Any] | None,
    save: Callable[..., None] | None,
) -> Callable[..., Any]:
    """Return what calls an op, past the dispatcher where that makes no difference.

    Args:
        op: an OpOverload that writes into none of its arguments.
        implementation: its kernel for CPU and CUDA tensors.
        backward: as `register_op` takes it; None leaves what needs a gradient to the dispatcher.
        save: as `register_op` takes it.
    """
    schema = op._schema
    kinds = [_TYPES.get(str(argument.type)) for argument in schema.arguments]
    if None in kinds or any(str(returned.type) != "Tensor" for returned in schema.returns):
        return op
    num_arguments, num_returns = len(kinds), len(schema.returns)

    def run(*args: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            result = implementation(*args)
        if num_returns == 1:
            if type(result) is torch.Tensor:
                return result
        elif isinstance(result, tuple | list) and len(result) == num_returns:
            if all(type(each) is torch.Tensor for each in result):
                return tuple(result)
        return op(*args)  # in which torch says what is wrong with the result

    def forward(ctx: Any, *args: Any) -> Any:
        result = run(*args)
        if save is not None:
            save(ctx, args, result)
        return result

    function: Any = None
    if backward is not None:
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function = type(schema.name.rpartition("::")[2], (torch.autograd.Function,), members)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or len(args) != num_arguments or not _is_plain():
            return op(*args, **kwargs)
        for value, allowed in zip(args, kinds, strict=True):
            kind = type(value)
            if kind not in allowed:  # type: ignore[operator]  # None has been ruled out
                return op(*args)
            if kind in TENSORS and _C._dispatch_keys(value).raw_repr() not in _PLAIN:
                return op(*args)
        if not (torch.is_grad_enabled() and _C._any_requires_grad(*args)):
            return run(*args)
        return op(*args) if function is None else function.apply(*args)

    call._schema = schema  # type: ignore[attr-defined]  # as an OpOverload has it
    return call


def _is_plain() -> bool:
    """Return whether a call means no more than its kernel here: nobody looks on."""
    return (
        _C._dispatch_tls_local_include_set().raw_repr() == _INCLUDED
        and not _C._dispatch_tls_local_exclude_set().raw_repr() & _PASSED
        and not _C._len_torch_function_stack()
        and not _C._autograd._profiler_enabled()
        and forward_ad._current_level < 0
    )

"""A torch op called without torch's dispatcher where nothing but the kernel would come of it.

The dispatcher and its Python kernels cost more than a launch. They are needed where somebody looks
on or changes what a call means (a compiler, a mode, a profiler, a transform), and for tensors that
are more than strided memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# What Python passes for a type of the schema; an int for a float would be converted.
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": _TENSORS,
    "Optional[Tensor]": (*_TENSORS, type(None)),
    "float": (float,),
    "Optional[float]": (float, type(None)),
    "int": (int, torch.dtype),  # a dtype counts as an int there
    "Optional[int]": (int, torch.dtype, type(None)),
    "bool": (bool,),
    "str": (str,),
}
_is_compiling = torch.compiler.is_compiling
_C = torch._C
_AUTOGRAD = _C.DispatchKey.AutogradCPU


def direct(op: Any, implementation: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return what calls an op, past the dispatcher where that makes no difference.

    Args:
        op: an OpOverload that writes into none of its arguments.
        implementation: its kernel for CPU and CUDA tensors.
        function: an autograd.Function over the op's arguments and a last one, which is None here.
    """
    names = [str(each.type) for each in op._schema.arguments]
    if not _TYPES.keys() >= set(names):
        return op
    types = [frozenset(_TYPES[name]) for name in names]

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(types) or not _is_alone():
            return op(*args, **kwargs)
        for value, allowed in zip(args, types, strict=True):
            if type(value) not in allowed:
                return op(*args)
            if type(value) in _TENSORS and not _is_memory(value):
                return op(*args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return function.apply(*args, None)
        return implementation(*args)

    return call


def _is_alone() -> bool:
    """Return whether nobody looks on: no compiler, tracer, mode, transform or profiler."""
    return not (
        _is_compiling()
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._are_functorch_transforms_active()
        or _C._autograd._profiler_enabled()
        or _C._get_tracing_state() is not None
        # inside another op, whose gradient is its own
        or _C._dispatch_tls_local_exclude_set().has(_AUTOGRAD)
    )


def _is_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided memory of a CPU or a CUDA device as it stands there."""
    return (
        (tensor.is_cuda or tensor.is_cpu)
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor.is_conj()
    )

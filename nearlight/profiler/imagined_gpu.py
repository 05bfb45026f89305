"""Run a program on fake CPU tensors as if they lay on a GPU, and leave nothing behind.

Fake *cuda* tensors need a driver, so the tensors are fake CPU tensors and what a program does
because of its device is rewritten while the block lasts: device arguments, `Module.to`,
autocast, scaled-dot-product attention.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from nearlight.profiler import lowering


@contextmanager
def imagined_gpu() -> Iterator[FakeTensorMode]:
    """Enter a world of fake tensors in which "cuda" means "cpu"; everything is restored after.

    Yields:
        The fake mode, which is active; `fake_copy` and `fake_batch` bring real objects into it.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "_apply", _apply_without_device))
        stack.enter_context(replaced(torch.autocast, "__init__", _autocast_for_cpu))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", lowering.sdpa))
        stack.enter_context(_cuda_autocast_list())
        stack.enter_context(fake_mode)
        stack.enter_context(_DevicesRewritten())
        yield fake_mode


def fake_copy(model: nn.Module, fake_mode: FakeTensorMode) -> nn.Module:
    """Return the model itself if all its tensors are fake, else a copy that has fake ones.

    The copy shares no tensor with the model and costs no memory; tied parameters stay tied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return model
    memo: dict[int, Any] = {id(tensor): _to_fake(tensor, fake_mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def fake_batch(
    batch: Mapping[str, torch.Tensor], fake_mode: FakeTensorMode
) -> dict[str, torch.Tensor]:
    """Return the batch with fake tensors."""
    return {name: _to_fake(tensor, fake_mode) for name, tensor in batch.items()}


def _to_fake(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type == "cpu":
        return fake_mode.from_tensor(tensor)
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while the block lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class _DevicesRewritten(TorchFunctionMode):
    """Replaces device arguments, and attention by one op whatever the program asks of it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is lowering.TORCH_SDPA:
            return lowering.sdpa(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if any(map(_is_cuda, args)) or _is_cuda(kwargs.get("device")):
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _apply_without_device(
    module: nn.Module, function: Callable[[Any], Any], recurse: bool = True
) -> nn.Module:
    """Stand in for `Module._apply`, whose swapping of parameters fails on fake tensors."""
    made: dict[int, nn.Parameter] = {}  # a tied parameter is converted once and stays tied
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                with torch.no_grad():
                    new = function(parameter)
                made[id(parameter)] = (
                    parameter
                    if new is parameter
                    else nn.Parameter(new.detach(), parameter.requires_grad)
                )
            part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


_autocast_init = torch.autocast.__init__


def _autocast_for_cpu(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    _autocast_init(self, device_type, dtype, enabled, cache_enabled)


# Ops that autocast runs in fp32 on CUDA and in the low precision on CPUs.
_FP32_ON_CUDA = (
    "layer_norm", "group_norm", "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "exp", "log", "cumsum", "softplus",
)  # fmt: skip


@contextmanager
def _cuda_autocast_list() -> Iterator[None]:
    """Make CPU autocast take fp32 where CUDA's does."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a kernel": that is the purpose
            for name in _FP32_ON_CUDA:
                library.impl(name, _in_fp32(name), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _in_fp32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            return value.float()
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return op(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})

    return call

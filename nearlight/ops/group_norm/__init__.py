"""Group normalisation: over some channels and all positions of each sample.

    y = (x − mean) / sqrt(var + eps) · weight + bias, mean and var over a group of a sample

Legend: N samples, C channels, G groups, S positions (all dimensions after the channels).
Source: Wu & He, "Group Normalization", 2018 (arXiv:1803.08494).
Limits: sums in fp32 (fp64 for fp64 inputs), by Welford's recurrence, and around an element of the
group where its mean is far above its deviation, which so costs no digits; gradients without
atomics, so equal in every run; x is read twice, and in the backward dy and x; no gradient of the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import FLOATS, accumulator, refuse_dtensor
from nearlight.ops.group_norm.kernels import config
from nearlight.ops.group_norm.registration import (
    backward,
    backward_cost,
    extra_bytes,
    forward,
    forward_cost,
    forward_op,
)

__all__ = ["OP", "config", "group_norm", "reference"]


def reference(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute it as PyTorch does; arguments as in `group_norm`."""
    if x.numel() == 0:  # of which PyTorch's gradients of weight and bias are NaN on a CPU
        for_channels = -1, *[1] * (x.ndim - 2)
        y = x.clone() if weight is None else x * weight.view(for_channels)
        return (y if bias is None else y + bias.view(for_channels)).to(x.dtype)
    if weight is None and bias is not None:  # which PyTorch's backward does not take on a CPU
        weight = torch.ones_like(bias)
    if all(each is None or each.dtype == x.dtype for each in (weight, bias)):
        return torch.group_norm(x, num_groups, weight, bias, eps)
    acc = accumulator(x.dtype)
    scale, shift = (None if each is None else each.to(acc) for each in (weight, bias))
    return torch.group_norm(x.to(acc), num_groups, scale, shift, eps).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Give each group of channels of a sample mean 0 and variance 1, then scale and shift.

    y = (x − mean) / sqrt(var + eps) · weight + bias

    Args:
        x: (N, C, ...) fp16, bf16, fp32 or fp64, any strides, on CPU or CUDA.
        num_groups: G, a divisor of C.
        weight: (C,) of any of these dtypes, on the same device; None for no scale.
        bias: (C,) as the weight; None for no shift.
        eps: added to the variance.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape and dtype of `x` (fp32 under CUDA autocast, as PyTorch's); channels last where x
        is, else contiguous.

    Raises:
        ValueError: shape, device, number of groups or backend that is not allowed.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Wu & He 2018, arXiv:1803.08494.

    Example:
        >>> import torch
        >>> from nearlight.ops import group_norm
        >>> group_norm(torch.tensor([[1.0, 3.0, 5.0, 5.0]]), 2)
        tensor([[-1.0000,  1.0000,  0.0000,  0.0000]])
    """
    refuse_dtensor("group_norm", x, weight, bias)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(
                f"group_norm: {name} is {tensor.dtype}; allowed are fp16, bf16, fp32, fp64"
            )
    if x.ndim < 2 or num_groups < 1 or x.shape[1] == 0 or x.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: x has shape {tuple(x.shape)} and num_groups is {num_groups}; allowed is "
            "(N, C, ...) with C a multiple of num_groups"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.shape != x.shape[1:2] or tensor.device != x.device):
            raise ValueError(
                f"group_norm: {name} has shape {tuple(tensor.shape)} on {tensor.device}; x of "
                f"shape {tuple(x.shape)} on {x.device} needs ({x.shape[1]},) there"
            )
    if not use_triton(backend, x):
        return reference(x, num_groups, weight, bias, eps)
    is_widened = x.is_cuda and torch.is_autocast_enabled("cuda")
    dtype = accumulator(x.dtype) if is_widened else x.dtype
    y: torch.Tensor = forward_op(x, num_groups, weight, bias, eps, dtype)[0]
    return y


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    samples, channels, positions = (case.shape[name] for name in ("N", "C", "S"))
    random = partial(normal, case, device, generator)
    x = random(samples, channels, positions)
    x = (x * (1.0 + torch.arange(channels, device=device) % 3)[:, None] + 0.5).to(case.dtype)
    if "channels_last" in case.name:
        x = x.mT.contiguous().mT
    inputs: Inputs = {"x": x.requires_grad_(), **case.options}
    for name, mean in (("weight", 1.0), ("bias", 0.0)):
        if name not in case.options:
            inputs[name] = (mean + 0.1 * random(channels)).to(case.dtype).requires_grad_()
    return inputs


def _meta(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    shape = tuple(case.shape[name] for name in ("N", "C", "S"))
    x = torch.empty(shape, dtype=case.dtype, device="meta")
    if "channels_last" in case.name:
        x = x.mT.contiguous().mT
    return x, torch.empty(shape[1], dtype=case.dtype, device="meta")


def _cost(case: Case) -> dict[str, Cost]:
    x, parameter = _meta(case)
    weight, bias = (None if name in case.options else parameter for name in ("weight", "bias"))
    there = forward_cost((x, 1, weight, bias), {}, (x,))
    needs = True, weight is not None, bias is not None
    results = [x, *(each for each in (weight, bias) if each is not None)]
    back = backward_cost((x, x, weight, needs), {}, results)
    return {"forward": there, "forward_backward": there + back}


def _flatten_group(inputs: Inputs) -> Inputs:
    x = inputs["x"].detach().clone()
    x[0] = 3e4
    return {**inputs, "x": x.requires_grad_()}


def _far_from_zero(inputs: Inputs) -> Inputs:
    x = inputs["x"].detach()
    return {**inputs, "x": (300.0 + 0.1 * x).requires_grad_()}


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    def run(x: Any, num_groups: int, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
        return LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], num_groups, eps)

    return run


def _builds(arch: str) -> list[KernelBuild]:
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds:
        for name in ("", "channels_last"):
            x, weight = _meta(Case(name, {"N": 16, "C": 320, "S": 64 * 64}, half))
            _, mean, rstd = forward(x, 32, weight, weight, 1e-5, half)
            backward(x, x, weight, mean, rstd, half, half, [True, True, True])
    return [replace(build, max_registers=128) for build in builds]


def _case(
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "",
    **options: Any,
) -> Case:
    words = [f"{samples}x{channels}x{positions} G{groups}", layout, *options]
    shape = {"N": samples, "C": channels, "S": positions}
    name = " ".join(word for word in words if word)
    return Case(name, shape, dtype, {"num_groups": groups, **options})


_LAST = "channels_last"

OP = Op(
    name="group_norm",
    function=group_norm,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        _case(16, 320, 64 * 64, 32),
        _case(16, 320, 64 * 64, 32, layout=_LAST),
        _case(4, 128, 512 * 512, 32),
        _case(4, 128, 512 * 512, 32, layout=_LAST),
        _case(16, 1280, 16 * 16, 32),
    ],
    check_cases=[
        *(
            _case(2, 6, 35, 3, dtype, layout)
            for dtype in (torch.float32, torch.bfloat16)
            for layout in ("", _LAST)
        ),
        *(_case(3, 4, 9, 2, dtype) for dtype in (torch.float16, torch.float64)),
        _case(2, 6, 17, 1, torch.float32, weight=None),
        _case(2, 6, 17, 6, torch.float32, bias=None),
        _case(3, 10, 1, 2, torch.float32),
        _case(1, 2, 70_001, 2, torch.float32),
        _case(1, 2, 70_001, 1, torch.float32, _LAST),
        _case(2, 5000, 3, 1, torch.bfloat16),
    ],
    large_cases=[_case(600, 32, 120_000, 8)],
    cost=_cost,
    extra_bytes=lambda case: extra_bytes(_meta(case)[0], case.options["num_groups"]),
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=_builds,
    extremes=[
        Extreme("a sample of one value", _case(2, 4, 65, 2, torch.float32), _flatten_group),
        Extreme("mean 300, deviation 0.1", _case(2, 32, 64, 8, torch.float32), _far_from_zero),
    ],
)

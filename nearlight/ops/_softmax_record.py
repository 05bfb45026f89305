"""What softmax and log_softmax share beside their kernels: checks, the reference, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.row_config import MAX_BLOCK, RowConfig
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops import _softmax


def check(op: str, x: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise unless x is (..., N) of a float dtype and the mask spreads over it."""
    refuse_dtensor(op, x, mask)
    if x.dtype not in FLOATS or (mask is not None and mask.dtype not in (torch.bool, *FLOATS)):
        given = x.dtype if mask is None else f"{x.dtype} with a mask of {mask.dtype}"
        raise TypeError(
            f"{op}: x is {given}; allowed are fp16, bf16, fp32, fp64, and masks of these or bool"
        )
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape (); allowed is (..., N)")
    if mask is None:
        return
    is_spread = mask.ndim <= x.ndim and all(
        own in (1, size) for own, size in zip(mask.shape[::-1], x.shape[::-1], strict=False)
    )
    if not is_spread or mask.device != x.device:
        raise ValueError(
            f"{op}: mask has shape {tuple(mask.shape)} on {mask.device}; it must broadcast to x "
            f"{tuple(x.shape)} on {x.device}"
        )
    if mask.requires_grad:
        raise ValueError(f"{op}: the mask gets no gradient; detach it, or add it to x")


def reference(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None, is_log: bool
) -> torch.Tensor:
    """Compute the softmax or its logarithm as a plain PyTorch model does."""
    scores = x * scale if scale != 1.0 else x
    function = F.log_softmax if is_log else F.softmax
    if mask is None:
        return function(scores, dim=-1)
    is_out = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    scores = scores if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(is_out, -torch.inf)
    # Of a row that is out as a whole nothing is computed, so that no NaN arises.
    y = function(scores.masked_fill(is_out.all(-1, keepdim=True), 0.0), dim=-1)
    return y.masked_fill(is_out, -torch.inf if is_log else 0.0).to(x.dtype)


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of every kind: flat, confident, tiny, large and far from 0; whole rows masked."""
    rows, width = case.shape["rows"], case.shape["N"]
    options = dict(case.options)
    kind_of_mask = options.pop("mask", "none")
    x = normal(case, device, generator, rows, width)
    kind = torch.arange(rows, device=device)[:, None] % 5
    x *= torch.tensor([1.0, 1.0, 1e-3, 30.0, 1.0], device=device)[kind]
    x[:, :1] += 12.0 * (kind == 1)
    x += 20.0 * (kind == 4)
    inputs: Inputs = {"x": x.to(case.dtype).requires_grad_(), **options}
    keep = torch.rand(rows, width, device=device, generator=generator) < 0.7
    keep[1:2] = False
    if kind_of_mask == "bool":
        inputs["mask"] = keep
    elif kind_of_mask == "additive":
        bias = normal(case, device, generator, rows, width)
        inputs["mask"] = bias.masked_fill(~keep, -torch.inf).to(case.dtype)
    elif kind_of_mask == "row":
        inputs["mask"] = keep[:1]
    return inputs


def _cost(case: Case) -> dict[str, Cost]:
    x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
    masks = {"bool": x.bool(), "additive": x, "row": x[:1].bool()}
    there = _softmax.forward_cost((x, masks.get(case.options.get("mask", ""))), {}, x)
    back = _softmax.backward_cost((x, x, None), {}, x)
    return {"forward": there, "forward_backward": there + back}


def _builds(config: Callable[..., RowConfig], is_log: bool, arch: str) -> Sequence[KernelBuild]:
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        for rows, width in ((16384, 4096), (8192, 16384), (8192, 32768), (4096, 131072)):
            x = torch.empty(rows, width, dtype=dtype)
            _softmax.forward(config, is_log, x, None, 1.0)
            _softmax.backward(config, is_log, x, x, None, 1.0)
        _softmax.forward(config, is_log, x, x[:1].bool(), 0.5)
    # 32 warps are left 64 each.
    return [
        replace(build, max_registers=min(144, 65536 // (32 * build.num_warps))) for build in builds
    ]


def _case(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    words = [f"{rows}x{width}", *(f"{name}={value}" for name, value in options.items())]
    return Case(" ".join(words), {"rows": rows, "N": width}, dtype, options)


def _minus_infinities(inputs: Inputs) -> Inputs:
    x = inputs["x"].detach().clone()
    x[0], x[1, ::2] = -torch.inf, -torch.inf
    return {**inputs, "x": x.requires_grad_()}


def _nan_where_masked(inputs: Inputs) -> Inputs:
    x = inputs["x"].detach().masked_fill(~inputs["mask"], torch.nan)
    return {**inputs, "x": x.requires_grad_()}


def _torch_peer(is_log: bool) -> Callable[..., torch.Tensor]:
    function = F.log_softmax if is_log else F.softmax
    return lambda x: function(x, dim=-1)


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.transformers.functional import liger_softmax

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = liger_softmax(x)
        return y

    return run


def record(
    function: Callable[..., Any],
    plain: Callable[..., Any],
    config: Callable[..., RowConfig],
    is_log: bool,
) -> Op:
    """Return the record of one of the two ops."""
    peers: Mapping[str, Any] = {"torch": partial(_torch_peer, is_log)}
    return Op(
        name=function.__name__,
        function=function,
        reference=plain,
        make_inputs=_make_inputs,
        cases=[
            _case(16384, 4096),
            _case(8192, 32768),
            _case(4096, 131_072),
            _case(16384, 5120),
            _case(8192, 50_257),
            _case(2048, 262_144),
        ],
        check_cases=[
            *(_case(5, width, torch.float32) for width in (1, 7, 128, 129)),
            *(_case(6, 65, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
            *(
                _case(6, 65, dtype, mask=mask, scale=-0.5)
                for mask in ("bool", "additive", "row")
                for dtype in (torch.float32, torch.bfloat16)
            ),
            _case(2, MAX_BLOCK + 1, torch.float32, mask="bool"),
            _case(2, 70_000, torch.bfloat16),
            _case(1, 262_145, torch.float32),
        ],
        large_cases=[_case(600_000, 4096), _case(20_000, 131_072)],
        cost=_cost,
        extra_bytes=lambda case: 0,
        peers=peers if is_log else {**peers, "liger": _liger_peer},
        builds=partial(_builds, config, is_log),
        extremes=[
            Extreme(
                "−inf in rows", _case(4, 65, torch.float32), _minus_infinities, is_finite=False
            ),
            Extreme(
                "NaN under the mask",
                _case(4, 65, torch.float32, mask="bool"),
                _nan_where_masked,
                is_finite=False,
            ),
        ],
    )

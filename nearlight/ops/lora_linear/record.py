"""The Op record of a linear layer with an adapter: inputs, cases, costs, peers and budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.cost import Cost
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import accumulator
from nearlight.ops.lora_linear.function import lora_linear, reference
from nearlight.ops.lora_linear.kernels import Dropout, across, down, up
from nearlight.ops.lora_linear.registration import Needs, backward_cost, call_cost
from nearlight.ops.lora_linear.tiles import across_config, down_config


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of every size and far from 0; an adapter that weighs as much as the layer."""
    rows, inner, outer, rank = (case.shape[name] for name in ("M", "K", "N", "R"))
    random = partial(normal, case, device, generator)
    kind = torch.arange(rows, device=device) % 4
    size = torch.tensor([1.0, 30.0, 1e-3, 1.0], device=device)[kind][:, None]
    x = random(rows, inner) * size + 3.0 * (kind == 3)[:, None]
    width = max(inner, 1) ** -0.5
    adapter = _adapter_dtype(case)
    seed = torch.randint(2**62, (2,), generator=generator, device=generator.device)
    inputs: Inputs = {
        "x": x.to(case.dtype).requires_grad_(),
        "weight": (random(outer, inner) * width).to(case.dtype),
        "lora_a": (random(rank, inner) * width).to(adapter).requires_grad_(),
        "lora_b": (random(outer, rank) * max(rank, 1) ** -0.5).to(adapter).requires_grad_(),
        "seed": seed.to(device),
    }
    if _has(case, "bias"):
        inputs["bias"] = random(outer).to(case.dtype).requires_grad_()
    if _has(case, "trained"):
        inputs["weight"].requires_grad_()
    return {**inputs, **case.options}


def _has(case: Case, part: str) -> bool:
    return bool(case.shape.get(part))


def _adapter_dtype(case: Case) -> torch.dtype:
    return accumulator(case.dtype) if _has(case, "wide") else case.dtype


def case_of(
    rows: int,
    inner: int,
    outer: int,
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    parts: Sequence[str] = (),
    **options: Any,
) -> Case:
    """Make a case; `parts`: "bias", "trained" (weight) and "wide" (adapter in fp32)."""
    words = [*parts, *(f"{name}={value}" for name, value in options.items())]
    shape = {"M": rows, "K": inner, "N": outer, "R": rank, **dict.fromkeys(parts, 1)}
    name = " ".join([f"M{rows} K{inner} N{outer} R{rank}", *words])
    return Case(name, shape, dtype, {"scale": 2.0, **options})


def _cost(case: Case) -> Mapping[str, Cost]:
    """The limit: each tensor once beside the products. What is read twice counts as time lost."""
    meta = _make_inputs(case, torch.device("meta"), torch.Generator())
    tensors = [meta[name] for name in ("x", "weight", "lora_a", "lora_b")]
    needs = Needs(True, _has(case, "trained"), True, True, _has(case, "bias"))
    forward = call_cost(*tensors)
    return {
        "forward": forward,
        "forward_backward": forward + backward_cost(needs, *tensors),
    }


def _extra_bytes(case: Case) -> int:
    """What has the rank for a width (l, dl), and the pieces of the sums over rows and columns."""
    rows, inner, outer, rank = (case.shape[name] for name in ("M", "K", "N", "R"))
    dot, acc = _adapter_dtype(case), accumulator(case.dtype)
    pieces = []
    for gpu in (None, find_gpu("h200")):
        for width in (inner, outer):
            shape = max(rows, 1), width, rank
            low = down_config(shape, dot.itemsize, gpu).num_pieces * rows
            wide = max(
                across_config(shape, dot.itemsize, gpu, is_writing).num_pieces
                for is_writing in (False, True)
            )
            pieces.append((max(low, wide * width) + width) * rank)
    return (max(pieces) + 3 * rows * rank + outer) * acc.itemsize + 8192


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """PEFT's layer, with PyTorch's own dropout."""
    del seed
    y = F.linear(x, weight, bias)
    branch = F.dropout(x.to(lora_a.dtype), p)
    return (y + F.linear(F.linear(branch, lora_a), lora_b) * scale).to(y.dtype)


def _builds(arch: str) -> Sequence[KernelBuild]:
    if arch == "sm_75":
        raise ValueError(
            "lora_linear is matrix products in bf16 and tf32, which sm_75 does not have: take "
            "sm_80 or later"
        )
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        dropout = Dropout(torch.empty(2, dtype=torch.int64), 0.1)
        for rank, adapter in ((16, torch.bfloat16), (64, torch.bfloat16), (16, torch.float32)):
            x = torch.empty(16384, 4096, dtype=torch.bfloat16)
            factor = torch.empty(rank, 4096, dtype=adapter)
            for drops in (None, dropout):
                low = down(x, factor, adapter, 1.0, drops)
                across(x, low, 1.0, drops, x, factor)
            up(x, low, torch.empty(4096, rank, dtype=adapter).t(), 2.0)
            across(x, low, 2.0, is_transposed=True)
    return [replace(build, uses_tensor_cores=True, max_registers=248) for build in builds]


_SHAPES = ((1, 1, 1, 1), (9, 127, 65, 3), (6, 64, 48, 8), (33, 80, 70, 17))
_PEFT: dict[str, Any] = {"p": 0.1}
_OPTIONS: tuple[dict[str, Any], ...] = ({}, _PEFT, {"p": 0.5}, _PEFT)

OP = Op(
    name="lora_linear",
    function=lora_linear,
    reference=reference,
    make_inputs=_make_inputs,
    cases=(
        case_of(16384, 4096, 4096, 16),
        case_of(16384, 4096, 4096, 16, **_PEFT),
        case_of(16384, 4096, 14336, 16, **_PEFT),
        case_of(16384, 14336, 4096, 16, **_PEFT),
        case_of(16384, 4096, 4096, 64, parts=("wide",), **_PEFT),
        case_of(8192, 2880, 5120, 8, parts=("bias",)),
        case_of(2048, 4096, 4096, 1, **_PEFT),
    ),
    check_cases=(
        *(
            case_of(*shape, dtype, **options)
            for shape, options in zip(_SHAPES, _OPTIONS, strict=True)
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            case_of(18, 48, 33, 5, dtype, ("wide", "bias", "trained"), p=0.3)
            for dtype in (torch.bfloat16, torch.float16)
        ),
        case_of(18, 48, 33, 5, torch.float16, ("bias",)),
        case_of(7, 12, 9, 2, torch.float64, ("trained",), p=0.3),
        case_of(5, 40, 24, 64, torch.bfloat16, p=1.0),
    ),
    # The mask depends on the number of a row, so rows alone would get another one.
    large_cases=(case_of(550_000, 4096, 64, 8), case_of(550_000, 64, 4096, 8)),
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": lambda: _plain},
    builds=_builds,
)

"""The Op record of linear cross entropy: cases, costs, peers and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, Op
from nearlight.ops.linear_cross_entropy.chunks import plan
from nearlight.ops.linear_cross_entropy.function import linear_cross_entropy
from nearlight.ops.linear_cross_entropy.kernels import (
    LossOptions,
    cross_entropy_,
    scale_,
    split_add_,
)
from nearlight.ops.linear_cross_entropy.reference import reference
from nearlight.ops.linear_cross_entropy.registration import VECTOR_BYTES_PER_ROW, call_cost


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of every kind: flat, confident (p ≈ 0.999), tiny, large and far from 0; some ignored."""
    rows, hidden, vocab = (case.shape[name] for name in ("BT", "H", "V"))

    def normal(*shape: int) -> torch.Tensor:
        wide = torch.promote_types(case.dtype, torch.float32)
        return torch.randn(*shape, device=device, generator=generator, dtype=wide)

    weight = normal(vocab, hidden) / max(hidden, 1) ** 0.5
    labels = torch.randint(vocab, (rows,), device=device, generator=generator)
    x = normal(rows, hidden)
    kind = torch.arange(rows, device=device) % 5
    # Along its own class's weight a row becomes sure of it.
    x += 12.0 * (kind == 1)[:, None] * weight[labels]
    x *= torch.tensor([1.0, 1.0, 1e-3, 30.0, 1.0], device=device)[kind][:, None]
    x += 3.0 * (kind == 4)[:, None]
    labels[kind == 2] = case.options.get("ignore_index", -100)
    inputs: Inputs = {
        "x": x.to(case.dtype).requires_grad_(),
        "weight": weight.to(case.dtype).requires_grad_(),
        "labels": labels,
    }
    if case.shape.get("bias"):
        inputs["bias"] = normal(vocab).to(case.dtype).requires_grad_()
    if case.shape.get("class_weight"):
        inputs["class_weight"] = normal(vocab).abs() + 0.1
    if case.shape.get("token_weight"):
        inputs["token_weight"] = normal(rows)
    return {**inputs, **case.options}


def _sizes(case: Case) -> tuple[int, int, int]:
    return case.shape["BT"], case.shape["V"], case.shape["H"]


def _needs(case: Case) -> tuple[bool, bool, bool]:
    return True, True, bool(case.shape.get("bias"))


def _cost(case: Case) -> Mapping[str, Cost]:
    """Logits, dX and dW: three products; the limit does not count logits computed twice."""
    budget_bytes = case.options.get("memory_budget_bytes")
    return {
        name: call_cost(*_sizes(case), case.dtype, needs, budget_bytes)
        for name, needs in (("forward", (False,) * 3), ("forward_backward", _needs(case)))
    }


def _extra_bytes(case: Case) -> int:
    budget_bytes = case.options.get("memory_budget_bytes")
    steps = plan(*_sizes(case), case.dtype, True, budget_bytes)
    vocab_vectors = 3 * case.shape["V"] * 4  # class weights and the sum of the bias gradient
    return steps.workspace_bytes + case.shape["BT"] * VECTOR_BYTES_PER_ROW + vocab_vectors + 8192


def _plain(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), labels)


def _liger() -> Callable[..., torch.Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def run(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = liger_fused_linear_cross_entropy(x, weight, labels)
        return loss

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    if arch == "sm_75":
        raise ValueError(
            "linear_cross_entropy is matrix products around a loss kernel, in bf16, which sm_75 "
            "does not have: take sm_80 or later"
        )
    with described_launches(gpu_of_arch(arch)) as loss_builds, torch.device("meta"):
        row = torch.empty(8192), torch.empty(8192, dtype=torch.int64)
        for vocab in (32000, 128256):
            logits = torch.empty(8192, vocab, dtype=torch.bfloat16)
            for options in (
                LossOptions(),
                LossOptions(softcap=30.0, label_smoothing=0.1, z_loss=1e-4),
            ):
                for write_gradient in (True, False):
                    cross_entropy_(logits, row[1], row[0], options, write_gradient=write_gradient)
    with described_launches(gpu_of_arch(arch)) as sum_builds, torch.device("meta"):
        upper, lower, product = (
            torch.empty(2048, 4096, dtype=dtype)
            for dtype in (torch.bfloat16, torch.uint8, torch.float32)
        )
        for is_first, is_last in ((True, False), (False, False), (False, True)):
            split_add_(upper, lower, product, is_first, is_last)
        scale_(upper, torch.empty(()))
    return [
        *(replace(build, max_registers=96) for build in loss_builds),
        *(replace(build, max_registers=64) for build in sum_builds),
    ]


def _case(
    rows: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    parts: Sequence[str] = (),
    **options: object,
) -> Case:
    """Make a case; `parts` names the optional tensors it has."""
    words = [*parts, *(f"{name}={value}" for name, value in options.items())]
    name = " ".join([f"BT{rows} H{hidden} V{vocab}", *words])
    return Case(
        name, {"BT": rows, "H": hidden, "V": vocab, **dict.fromkeys(parts, 1)}, dtype, options
    )


_SHAPES = ((1, 8, 1), (1, 16, 37), (2, 8, 127), (3, 33, 129), (127, 16, 64), (129, 8, 65))
_OPTIONS: tuple[dict[str, object], ...] = (
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"logit_scale": 0.25},
    {"reduction": "sum", "num_items": 7},
    {"reduction": "none", "softcap": 3.0, "z_loss": 1e-3},
    {"ignore_index": 3},
    # What each adds to the gradient must not replace what the others did.
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.25},
)

OP = Op(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=reference,
    make_inputs=_make_inputs,
    cases=(_case(8192, 4096, 128256), _case(32768, 4096, 128256), _case(16384, 2048, 151936)),
    check_cases=(
        *(_case(*shape, dtype) for shape in _SHAPES for dtype in (torch.float32, torch.bfloat16)),
        *(_case(23, 16, 53, torch.float32, **options) for options in _OPTIONS),  # type: ignore[arg-type]  # mixed options
        *(
            _case(23, 16, 53, dtype, ("bias", "class_weight", "token_weight"), label_smoothing=0.2)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)
        ),
        # Six chunks of 128 rows: the weight gradient's 24-bit sum.
        _case(768, 8, 40, memory_budget_bytes=128 * 64 * 2 + 40 * 8 * 5),
        _case(5, 16, 131_073, torch.float32),
    ),
    # One chunk: the logits of all rows together have 2.6e9 elements.
    large_cases=tuple(
        _case(20_000, 512, 128_256, reduction=reduction, memory_budget_bytes=8 * 2**30)
        for reduction in ("sum", "none")
    ),
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": lambda: _plain, "liger": _liger},
    builds=_builds,
)

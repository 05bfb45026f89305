"""The Op records of both divergences: cases, costs, peers and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.ops import _linear_record
from nearlight.ops._linear_logits import VECTOR_BYTES_PER_ROW
from nearlight.ops._linear_record import case_of, gradients_of, refuse_turing, sizes
from nearlight.ops.linear_kl_div.kernels import Options, divergence_
from nearlight.ops.linear_kl_div.registration import call_cost, chunks_of

# The teacher's width over the student's.
WIDER = 2
_SHAPES = ((1, 8, 1), (1, 16, 37), (2, 8, 127), (3, 33, 129), (127, 16, 64), (129, 8, 65))
_COMMON: tuple[dict[str, Any], ...] = (
    {"temperature": 2.0},
    {"softcap": 5.0, "teacher_logit_scale": 0.5},
    {"logit_scale": 0.25, "teacher_softcap": 3.0, "temperature": 0.7},
    {"reduction": "sum"},
    {"reduction": "none", "softcap": 3.0},
    {"reduction": "batchmean", "ignore_index": 3},
)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """The student's rows of every kind, and a teacher that is wider and of another mind."""
    inputs = _linear_record.make_inputs(case, device, generator)
    rows, vocab, hidden = sizes(case)
    random = partial(normal, case, device, generator)
    inputs["teacher_x"] = (2.0 * random(rows, WIDER * hidden)).to(case.dtype)
    head = random(vocab, WIDER * hidden) / max(WIDER * hidden, 1) ** 0.5
    inputs["teacher_weight"] = head.to(case.dtype)
    if case.shape.get("teacher_bias"):
        inputs["teacher_bias"] = random(vocab).to(case.dtype)
    return inputs


def _cost(case: Case) -> Mapping[str, Cost]:
    """Both logits, dX and dW: the limit does not count logits computed twice."""
    rows, vocab, hidden = sizes(case)
    budget_bytes = case.options.get("memory_budget_bytes")
    return {
        name: call_cost(rows, vocab, hidden, WIDER * hidden, case.dtype, needs, budget_bytes)
        for name, needs in (("forward", (False,) * 3), ("forward_backward", gradients_of(case)))
    }


def _extra_bytes(case: Case) -> int:
    steps = chunks_of(*sizes(case), case.dtype, True, case.options.get("memory_budget_bytes"))
    bias_bytes = 2 * case.shape["V"] * 4  # the sum of its gradient
    return steps.workspace_bytes + case.shape["BT"] * VECTOR_BYTES_PER_ROW + bias_bytes + 8192


def _builds(op: str, betas: Sequence[float], arch: str) -> Sequence[KernelBuild]:
    refuse_turing(op, arch)
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        labels, row = torch.empty(8192, dtype=torch.int64), torch.empty(8192)
        for vocab in (50257, 128256):
            logits = torch.empty(8192, vocab, dtype=torch.bfloat16)
            for beta in betas:
                plain = Options(beta)
                capped = Options(beta, temperature=2.0, softcap=30.0, teacher_softcap=30.0)
                for options in (plain, capped):
                    for write_gradient in (True, False):
                        divergence_(logits, logits, labels, row, row, options, write_gradient)
    return [replace(build, max_registers=128) for build in builds]


def _without_classes(teacher_too: bool, inputs: Inputs) -> Inputs:
    """Take out the first class of the student, and of the teacher or another one of it."""
    bias, teacher_bias = (inputs[name].detach().clone() for name in ("bias", "teacher_bias"))
    bias[0] = -torch.inf
    teacher_bias[0 if teacher_too else -1] = -torch.inf
    return {**inputs, "bias": bias.requires_grad_(), "teacher_bias": teacher_bias}


def make_record(
    name: str,
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    betas: Sequence[float],
    choices: Sequence[dict[str, Any]],
    peers: Mapping[str, Callable[[], Callable[..., Any]]],
    is_bounded: bool,
) -> Op:
    """Make the record of a divergence.

    Args:
        name: of the op.
        function: its public function.
        reference: in plain PyTorch.
        betas: what its kernels are compiled for.
        choices: its own options beside the default, each proved.
        peers: as in `Op`.
        is_bounded: whether it is finite for classes that only one model has.
    """
    parts = ("bias", "teacher_bias")
    masked = case_of(4, 8, 33, torch.float32, parts)
    fp32, bf16 = torch.float32, torch.bfloat16
    return Op(
        name=name,
        function=function,
        reference=reference,
        make_inputs=make_inputs,
        cases=(case_of(8192, 2048, 128256), case_of(16384, 2048, 151936)),
        check_cases=(
            *(case_of(*shape, dtype) for shape in _SHAPES for dtype in (fp32, bf16)),
            *(case_of(23, 16, 53, fp32, **options) for options in (*_COMMON, *choices)),
            *(
                case_of(23, 16, 53, dtype, parts)
                for dtype in (torch.float16, bf16, fp32, torch.float64)
            ),
            # Six chunks of 128 rows: the weight gradient's 24-bit sum.
            case_of(768, 8, 40, memory_budget_bytes=2 * 128 * 64 * 2 + 40 * 8 * 5),
            case_of(3, 8, 65_537, fp32),
        ),
        # One chunk: the logits of all rows together have 2.6e9 elements.
        large_cases=(
            case_of(20_000, 512, 128_256, reduction="none", memory_budget_bytes=16 * 2**30),
        ),
        cost=_cost,
        extra_bytes=_extra_bytes,
        peers={"torch": lambda: reference, **peers},
        builds=partial(_builds, name, betas),
        extremes=(
            Extreme("a class that neither has", masked, partial(_without_classes, True)),
            Extreme(
                "classes that one of them has",
                masked,
                partial(_without_classes, False),
                is_finite=is_bounded,
            ),
        ),
    )

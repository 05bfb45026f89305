"""Linear JSD: generalised Jensen-Shannon divergence of two linear heads, without their logits.

    q = softmax(z) of the student, p of the teacher, z as in linear_kl_div; m = β p + (1 − β) q
    loss = β KL(p ‖ m) + (1 − β) KL(q ‖ m)
    dz_v = (1 − β) q_v (log q_v − log m_v − KL(q ‖ m))

Legend: ... (or M) rows, H and T hidden widths of student and teacher, V vocabulary.

The kernel, the loop and the limits are those of linear_kl_div, which are its ends: β = 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nearlight.ops.linear_kl_div.function import divergence, reference_divergence
from nearlight.ops.linear_kl_div.record import make_record

__all__ = ["OP", "linear_jsd", "reference"]


def reference(*tensors: Any, beta: float = 0.5, **options: Any) -> torch.Tensor:
    """Compute the divergence with all logits at once; arguments as in `linear_jsd`."""
    return reference_divergence(float(beta), *tensors, **options)


def linear_jsd(
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    reduction: str = "mean",
    memory_budget_bytes: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute the generalised Jensen-Shannon divergence between two linear heads, without logits.

    With q the student's and p the teacher's softmax of softcapped logits over the temperature:

        m = β p + (1 − β) q        β · KL(p ‖ m) + (1 − β) · KL(q ‖ m)

    and, by convention, KL(p ‖ q) for β = 0 and KL(q ‖ p) for β = 1. These are no limits of the
    formula, which tends to 0 at both ends (over β or 1 − β to them). Between them it is finite
    whatever classes are at −inf. Nothing is multiplied by temperature².

    Args:
        x: (..., H) of the student, bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        weight: (V, H) in the dtype and on the device of x, any strides.
        teacher_x: (..., T), likewise; without a gradient, as all of the teacher.
        teacher_weight: (V, T), likewise.
        labels: (...) int64, any strides; only told apart from `ignore_index`. None: all rows count.
        bias: (V,) in the dtype of x; −inf takes a class out.
        teacher_bias: (V,), likewise.
        beta: β in [0, 1], the teacher's share of the mixture.
        ignore_index: label of the rows whose divergence and gradient are 0.
        temperature: what the final logits of both are divided by, > 0.
        softcap: bound of the student's logits, > 0; None for none.
        logit_scale: factor of the student's logits, before the softcap.
        teacher_softcap: of the teacher.
        teacher_logit_scale: of the teacher.
        reduction: "mean" divides the sum by the number of rows that count, "batchmean" by x's
            first size, ignored rows among it, "sum" by nothing; or "none".
        memory_budget_bytes: device memory for both chunks of logits and what sums the weight
            gradient; None: 512 MiB, up to 2 GiB for many rows.
        backend: "auto" (Triton on CUDA, plain PyTorch on the CPU), "triton" or "reference".

    Returns:
        fp32 (fp64 for fp64): a scalar, or (...) for "none"; 0 with zero gradients where no row
        counts. Differentiable once in x, weight and bias.

    Raises:
        TypeError: dtypes that differ or are not allowed, DTensors.
        ValueError: shapes, devices, options or a budget that do not fit; a teacher with a gradient.

    Source: Agarwal et al. 2023, arXiv 2306.13649 (GKD); the ends as in TRL's GKD trainer and in
    Liger-Kernel's fused linear JSD.

    Example:
        >>> x, weight = torch.zeros(2, 4), torch.ones(10, 4)
        >>> linear_jsd(x, weight, x, weight)
        tensor(0.)
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta}: allowed is 0 to 1")
    options = {
        "ignore_index": ignore_index,
        "temperature": temperature,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "teacher_softcap": teacher_softcap,
        "teacher_logit_scale": teacher_logit_scale,
        "reduction": reduction,
        "memory_budget_bytes": memory_budget_bytes,
    }
    tensors = x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias
    return divergence("linear_jsd", float(beta), *tensors, backend, options)


def _liger() -> Callable[..., torch.Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        teacher_x: torch.Tensor,
        teacher_weight: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        loss: torch.Tensor = liger_fused_linear_jsd(x, weight, teacher_x, teacher_weight, labels)
        return loss

    return run


OP = make_record(
    "linear_jsd",
    linear_jsd,
    reference,
    betas=(0.5,),
    choices=({"beta": 0.1}, {"beta": 0.9, "softcap": 5.0}, {"beta": 0.0}, {"beta": 1.0}),
    peers={"liger": _liger},
    is_bounded=True,
)

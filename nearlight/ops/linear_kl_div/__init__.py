"""Linear KL divergence: distillation from a teacher's hidden states, without anyone's logits.

    u = logit_scale · (x · weightᵀ + bias), z = softcap · tanh(u / softcap) / temperature
    q = softmax(z) of the student, p likewise of the teacher
    KL(p ‖ q) = Σ p_v (log p_v − log q_v)      dz_v = q_v − p_v
    KL(q ‖ p) = Σ q_v (log q_v − log p_v)      dz_v = q_v (log q_v − log p_v − KL(q ‖ p))
    dx = dlogits · weight        dweight = dlogitsᵀ · x        dbias = Σ dlogits

Legend: ... (or M) rows, H and T hidden widths of student and teacher, V vocabulary.

Rows are taken in chunks (../_chunks.py): cuBLAS computes both models' logits into two buffers, and
one kernel turns them into divergences and the student's gradient in place.
Limits: no second derivative; none for the teacher; fp16 and reduction="none" compute the logits
twice. Logits of ignored rows may be NaN, their x may not: in dweight it is multiplied by 0.
"""

from __future__ import annotations

from typing import Any

import torch

from nearlight.ops.linear_kl_div.function import divergence, reference_divergence
from nearlight.ops.linear_kl_div.record import make_record

__all__ = ["OP", "linear_kl_div", "reference"]


def reference(*tensors: Any, reverse: bool = False, **options: Any) -> torch.Tensor:
    """Compute the KL divergence with all logits at once; arguments as in `linear_kl_div`."""
    return reference_divergence(float(reverse), *tensors, **options)


def linear_kl_div(
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    reverse: bool = False,
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
    """Compute the KL divergence between two linear heads without storing their logits whole.

    With q the student's and p the teacher's softmax of softcapped logits over the temperature:

        Σ_v p_v (log p_v − log q_v)        reverse: Σ_v q_v (log q_v − log p_v)

    A class at −inf on both sides, or with probability 0 on the side that weighs, counts 0; one at
    −inf on the other side alone makes the divergence infinite. Nothing is multiplied by
    temperature².

    Args:
        x: (..., H) of the student, bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        weight: (V, H) in the dtype and on the device of x, any strides.
        teacher_x: (..., T), likewise; without a gradient, as all of the teacher.
        teacher_weight: (V, T), likewise.
        labels: (...) int64, any strides; only told apart from `ignore_index`. None: all rows count.
        bias: (V,) in the dtype of x; −inf takes a class out.
        teacher_bias: (V,), likewise.
        reverse: False for KL(teacher ‖ student), True for KL(student ‖ teacher).
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

    Source: torch.nn.functional.kl_div; reverse: Gu et al. 2023, arXiv 2306.08543.

    Example:
        >>> x, weight = torch.zeros(2, 4), torch.ones(10, 4)
        >>> linear_kl_div(x, weight, x, weight)
        tensor(0.)
    """
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
    return divergence("linear_kl_div", float(reverse), *tensors, backend, options)


OP = make_record(
    "linear_kl_div",
    linear_kl_div,
    reference,
    betas=(0.0, 1.0),
    choices=({"reverse": True}, {"reverse": True, "softcap": 5.0, "temperature": 2.0}),
    peers={},
    is_bounded=False,
)

"""What both public functions do: checks, autocast, the choice of the backend, the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.rows import accumulator
from nearlight.ops._linear_logits import autocast, check_options, check_tensors
from nearlight.ops.linear_kl_div.registration import Arguments, divisor_of, forward_op

REDUCTIONS = ("mean", "sum", "none", "batchmean")


def _weighed(probability: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return probability · log_ratio, 0 and without a gradient where the probability is 0."""
    is_nothing = probability == 0
    return (probability * log_ratio.masked_fill(is_nothing, 0.0)).masked_fill(is_nothing, 0.0)


def divergences(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergence of each row of log-probabilities, the student's and the teacher's."""
    # Where a probability underflows, a KL to an impossible class is infinite all the same.
    tiny = torch.finfo(log_p.dtype).tiny
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        p = torch.where(log_p == -torch.inf, 0.0, p.clamp_min(tiny))
        return _weighed(p, log_p - log_q).sum(-1)
    if beta == 1.0:
        q = torch.where((log_q != -torch.inf) & (log_p == -torch.inf), q.clamp_min(tiny), q)
        return _weighed(q, log_q - log_p).sum(-1)
    mixture = beta * p + (1.0 - beta) * q
    log_m = mixture.masked_fill(mixture == 0, 1.0).log()
    return (beta * _weighed(p, log_p - log_m) + (1.0 - beta) * _weighed(q, log_q - log_m)).sum(-1)


def reference_divergence(
    beta: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    reduction: str = "mean",
    memory_budget_bytes: int | None = None,
) -> torch.Tensor:
    """Compute the divergence with all logits of both at once; arguments as in `linear_jsd`.

    The logits have the dtype of x, as in a plain model; all after them is fp32 (fp64 for fp64).
    """
    del memory_budget_bytes  # a bound for chunks; here all logits exist
    if labels is None:
        labels = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    is_counted = labels != ignore_index

    def log_probs(logits: torch.Tensor, softcap: float | None, logit_scale: float) -> torch.Tensor:
        # A gate for the gradient, too: what NaN the logits of an ignored row make ends here, as 0.
        logits = logits.masked_fill(~is_counted.unsqueeze(-1), 0.0)
        logits = logits.to(accumulator(logits.dtype)) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return (logits / temperature).log_softmax(-1)

    log_q = log_probs(F.linear(x, weight, bias), softcap, logit_scale)
    teacher = F.linear(teacher_x, teacher_weight, teacher_bias)
    log_p = log_probs(teacher, teacher_softcap, teacher_logit_scale)
    loss = divergences(log_q, log_p, beta).masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return loss
    divisor = divisor_of(labels, ignore_index, reduction, loss.dtype)
    # Nothing to divide by: 0 with a live graph.
    return torch.where(divisor != 0, loss.sum() / torch.where(divisor != 0, divisor, 1.0), 0.0)


def divergence(
    op: str,
    beta: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    labels: torch.Tensor | None,
    bias: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    backend: str,
    options: dict[str, Any],
) -> torch.Tensor:
    """Check the arguments of the op of this name and compute it; `options` are its keywords."""
    x, weight, bias = autocast(x, weight, bias)
    teacher_x, teacher_weight, teacher_bias = autocast(teacher_x, teacher_weight, teacher_bias)
    if labels is None:
        labels = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    check_tensors(op, x, weight, labels, bias)
    _check_teacher(op, x, weight, teacher_x, teacher_weight, teacher_bias)
    check_options(options["softcap"], options["memory_budget_bytes"])
    check_options(options["teacher_softcap"], None)
    if not options["temperature"] > 0.0:
        raise ValueError(f"temperature={options['temperature']}: allowed are numbers above 0")
    if options["reduction"] not in REDUCTIONS:
        raise ValueError(f"reduction={options['reduction']!r}: allowed are {', '.join(REDUCTIONS)}")
    tensors = x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias
    if not use_triton(backend, x):
        return reference_divergence(beta, *tensors, **options)
    needs: dict[str, Any] = {
        f"needs_{name}": torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias))
    }
    named: dict[str, Any] = dict(zip(Arguments._fields, tensors, strict=False))
    loss: torch.Tensor = forward_op(*Arguments(**named, beta=beta, **options, **needs))[0]
    return loss


def _check_teacher(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    teacher_x: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
) -> None:
    if teacher_x.ndim == 0 or teacher_weight.ndim != 2 or 0 in teacher_weight.shape:
        raise ValueError(
            f"{op}: teacher_x {tuple(teacher_x.shape)} and teacher_weight "
            f"{tuple(teacher_weight.shape)}: allowed are (..., T) and (V, T) with T ≥ 1"
        )
    wanted = {
        "teacher_x": (teacher_x, (*x.shape[:-1], teacher_weight.shape[1])),
        "teacher_weight": (teacher_weight, (weight.shape[0], teacher_weight.shape[1])),
        "teacher_bias": (teacher_bias, weight.shape[:1]),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if hasattr(tensor, "to_local"):
            raise TypeError(f"{op}: {name} is a DTensor: pass local tensors ({name}.to_local())")
        if tensor.shape != shape or tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} is {tuple(tensor.shape)} on {tensor.device}: for x "
                f"{tuple(x.shape)} and weight {tuple(weight.shape)} on {x.device} it must be "
                f"{tuple(shape)} there"
            )
        if tensor.dtype != x.dtype:
            raise TypeError(f"{op}: x is {x.dtype} and {name} {tensor.dtype}: convert one")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, and gets none: detach it")

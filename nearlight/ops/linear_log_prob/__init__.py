"""Linear log prob: log-probabilities of tokens, and entropies, without the logits of a vocabulary.

    u = logit_scale · (x · weightᵀ + bias), z = softcap · tanh(u / softcap) / temperature
    log p_v = z_v − log Σ exp z        H = −Σ p_v log p_v
    dz_v = dlog_prob · ([v = label] − p_v) − dH · p_v · (log p_v + H)
    dx = dlogits · weight        dweight = dlogitsᵀ · x        dbias = Σ dlogits

Legend: ... (or M) rows, H hidden width (entropy in the formulas), V vocabulary.
Source: the chunks of linear_cross_entropy; the entropy's gradient follows from ∂p/∂z.
Limits: no second derivative; the backward computes the logits once more. Logits of ignored rows may
be NaN, their x may not: in dweight it is multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op
from nearlight.core.rows import accumulator
from nearlight.ops._chunks import plan
from nearlight.ops._linear_logits import (
    VECTOR_BYTES_PER_ROW,
    autocast,
    check_labels,
    check_options,
    check_tensors,
)
from nearlight.ops._linear_record import (
    case_of,
    gradients_of,
    make_inputs,
    refuse_turing,
    sizes,
)
from nearlight.ops.linear_log_prob.kernels import Options, log_prob_of, logits_gradient_
from nearlight.ops.linear_log_prob.registration import Arguments, call_cost, forward_op

__all__ = ["OP", "linear_log_prob", "reference"]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: bool = False,
    memory_budget_bytes: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probabilities with all logits at once; arguments as in `linear_log_prob`.

    The logits have the dtype of x, as in a plain model; all after them is fp32 (fp64 for fp64).
    """
    del memory_budget_bytes  # a bound for chunks; here all logits exist
    is_counted = labels != ignore_index
    # A gate for the gradient, too: what NaN the logits of an ignored row make ends here, as 0.
    logits = F.linear(x, weight, bias).masked_fill_(~is_counted.unsqueeze(-1), 0.0)
    logits = logits.to(accumulator(logits.dtype)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    target = labels.masked_fill(~is_counted, 0).unsqueeze(-1)
    log_prob = log_probs.gather(-1, target).squeeze(-1).masked_fill(~is_counted, 0.0)
    if not return_entropy:
        return log_prob
    # A class at −inf has no part in the entropy: 0 · −inf is 0.
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    entropy = -(log_probs.exp() * finite).sum(-1)
    return log_prob, entropy.masked_fill(~is_counted, 0.0)


def linear_log_prob(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: bool = False,
    memory_budget_bytes: int | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute each token's log-probability under a linear head without storing its logits whole.

    With u = logit_scale · (x · weightᵀ + bias) and z = softcap · tanh(u / softcap) / temperature
    (without a softcap: u / temperature):

        log p = z_label − log Σ_v exp(z_v)        entropy = −Σ_v p_v log p_v

    Args:
        x: (..., H) bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        weight: (V, H) in the dtype and on the device of x, any strides.
        labels: (...) int64, any strides; in [0, V) or `ignore_index`.
        bias: (V,) in the dtype of x; −inf takes a class out.
        ignore_index: label of the rows whose results and gradients are 0.
        softcap: bound of the logits, > 0; None for none.
        logit_scale: factor of the logits, before the softcap.
        temperature: what the final logits are divided by, > 0: that of the sampling.
        return_entropy: whether to return the entropy of each row's distribution, in nats.
        memory_budget_bytes: device memory for the chunk of logits and what sums the weight
            gradient; None: 512 MiB, up to 2 GiB for many rows. Plain PyTorch keeps all logits.
        backend: "auto" (Triton on CUDA, plain PyTorch on the CPU), "triton" or "reference".

    Returns:
        (...) fp32 (fp64 for fp64), or two of them, log-probabilities and entropies; each
        differentiable once in x, weight and bias under any upstream gradient.

    Raises:
        TypeError: dtypes that differ or are not allowed, DTensors.
        ValueError: shapes, devices, options or a budget that do not fit; a label outside on a
            CPU (on CUDA a RuntimeError when the device gets there).

    Source: log_softmax and gather of torch; softcap: Gemma 2, arXiv 2408.00118.

    Example:
        >>> x, weight = torch.zeros(2, 4), torch.ones(10, 4)
        >>> linear_log_prob(x, weight, torch.tensor([3, -100]))
        tensor([-2.3026,  0.0000])
    """
    x, weight, bias = autocast(x, weight, bias)
    check_tensors("linear_log_prob", x, weight, labels, bias)
    check_options(softcap, memory_budget_bytes)
    if not temperature > 0.0:
        raise ValueError(f"temperature={temperature}: allowed are numbers above 0")
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "temperature": temperature,
        "return_entropy": return_entropy,
        "memory_budget_bytes": memory_budget_bytes,
    }
    if not use_triton(backend, x):
        if type(labels) is torch.Tensor and labels.is_cpu and not torch.compiler.is_compiling():
            check_labels("linear_log_prob", labels, weight.shape[0], ignore_index)
        return reference(x, weight, labels, bias, **options)
    needs: dict[str, Any] = {
        f"needs_{name}": torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias))
    }
    log_prob, entropy, _ = forward_op(*Arguments(x, weight, labels, bias, **options, **needs))
    return (log_prob, entropy) if return_entropy else log_prob


def _cost(case: Case) -> Mapping[str, Cost]:
    """Logits, dX and dW: three products; the limit does not count logits computed twice."""
    budget_bytes = case.options.get("memory_budget_bytes")
    return {
        name: call_cost(*sizes(case), case.dtype, needed, True, budget_bytes)
        for name, needed in (("forward", (False,) * 3), ("forward_backward", gradients_of(case)))
    }


def _extra_bytes(case: Case) -> int:
    steps = plan(*sizes(case), case.dtype, True, case.options.get("memory_budget_bytes"))
    bias_bytes = 2 * case.shape["V"] * 4  # the sum of its gradient
    return steps.workspace_bytes + case.shape["BT"] * VECTOR_BYTES_PER_ROW + bias_bytes + 8192


def _liger() -> Callable[..., torch.Tensor]:
    from liger_kernel.chunked_loss import fused_linear_ppo

    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction

    def run(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_prob: torch.Tensor = function.apply(x, weight, labels, None, 1.0, 4096)
        return log_prob.masked_fill(labels == -100, 0.0)

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    refuse_turing("linear_log_prob", arch)
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        labels, row = torch.empty(8192, dtype=torch.int64), torch.empty(8192)
        for vocab in (50257, 128256):
            logits = torch.empty(8192, vocab, dtype=torch.bfloat16)
            for options in (Options(), Options(softcap=30.0, temperature=0.7)):
                log_prob_of(logits, labels, [row] * 3, options)
                log_prob_of(logits, labels, [row] * 4, options)
                logits_gradient_(logits, labels, [row] * 3, row, None, options)
                logits_gradient_(logits, labels, [row] * 4, row, row, options)
    return [replace(build, max_registers=128) for build in builds]


def _without_classes(inputs: Inputs) -> Inputs:
    """Take out the first classes, the first row's target among them, and most of the others."""
    bias = inputs["bias"].detach().clone()
    bias[: len(bias) - 3] = -torch.inf
    labels = torch.full_like(inputs["labels"], len(bias) - 1)
    labels[0] = 0
    return {**inputs, "bias": bias.requires_grad_(), "labels": labels}


_SHAPES = ((1, 8, 1), (1, 16, 37), (2, 8, 127), (3, 33, 129), (127, 16, 64), (129, 8, 65))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"softcap": 5.0},
    {"logit_scale": 0.25, "temperature": 0.5},
    {"ignore_index": 3},
    {"softcap": 3.0, "logit_scale": 2.0, "temperature": 1.7},
)
_BOTH: dict[str, Any] = {"return_entropy": True}

OP = Op(
    name="linear_log_prob",
    function=linear_log_prob,
    reference=reference,
    make_inputs=make_inputs,
    cases=(
        case_of(8192, 4096, 128256),
        case_of(8192, 4096, 128256, **_BOTH),
        case_of(32768, 4096, 128256),
        case_of(16384, 3584, 151936, **_BOTH),
    ),
    check_cases=(
        *(
            case_of(*shape, dtype, **_BOTH)
            for shape in _SHAPES
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(case_of(23, 16, 53, torch.float32, **_BOTH, **options) for options in _OPTIONS),
        case_of(23, 16, 53, torch.float32),
        *(
            case_of(23, 16, 53, dtype, ("bias",), **_BOTH)
            for dtype in (torch.float16, torch.bfloat16, torch.float64)
        ),
        # Six chunks of 128 rows: the weight gradient's 24-bit sum.
        case_of(768, 8, 40, memory_budget_bytes=128 * 64 * 2 + 40 * 8 * 5, **_BOTH),
        case_of(5, 16, 131_073, torch.float32, **_BOTH),
    ),
    # One chunk: the logits of all rows together have 2.6e9 elements.
    large_cases=(case_of(20_000, 512, 128_256, memory_budget_bytes=8 * 2**30, **_BOTH),),
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": lambda: reference, "liger": _liger},
    builds=_builds,
    extremes=(
        Extreme(
            "classes at −inf, a target among them",
            case_of(4, 8, 33, torch.float32, ("bias",), **_BOTH),
            _without_classes,
            is_finite=False,
        ),
    ),
)

"""The public function of cross entropy, and its reference in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.rows import FLOATS, accumulator, refuse_dtensor
from nearlight.ops._linear_logits import check_labels, check_options
from nearlight.ops.cross_entropy.registration import InPlace, forward_op
from nearlight.ops.linear_cross_entropy.function import _check_options

STATS = ("logsumexp", "argmax", "correct", "entropy")


def reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: float | torch.Tensor | None = None,
    inplace: bool = False,
    stats: Sequence[str] = (),
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute the loss as a plain PyTorch model does; arguments as in `cross_entropy`."""
    del inplace  # leave to write over the logits, of which plain PyTorch makes no use
    is_counted = labels != ignore_index
    # A gate for the gradient, too: what NaN an ignored row's weights make ends here, as 0.
    raw = logits.masked_fill(~is_counted.unsqueeze(-1), 0.0)
    dtype = accumulator(logits.dtype)
    scaled = raw.to(dtype) * logit_scale
    if softcap is not None:
        scaled = softcap * torch.tanh(scaled / softcap)
    target = labels.masked_fill(~is_counted, 0)
    log_probs = scaled.log_softmax(-1)
    loss = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    weights = torch.ones_like(loss)
    if class_weight is not None:
        weights = class_weight.to(dtype)[target]
    loss = (1.0 - label_smoothing) * weights * loss
    if label_smoothing > 0:
        spread = log_probs if class_weight is None else log_probs * class_weight.to(dtype)
        loss = loss - label_smoothing * spread.sum(-1) / logits.shape[-1]
    if z_loss > 0:
        loss = loss + z_loss * scaled.logsumexp(-1).square()
    if token_weight is not None:
        loss = loss * token_weight.to(dtype)
        weights = weights * token_weight.to(dtype)
    loss = torch.where(is_counted, loss, 0.0)
    divisor = torch.ones((), dtype=dtype, device=loss.device)
    if reduction == "mean":
        divisor = torch.where(is_counted, weights, 0.0).sum()
    elif num_items is not None:
        divisor = torch.as_tensor(num_items, dtype=dtype, device=loss.device)
    if reduction != "none":
        # Nothing to divide by: 0 with a live graph, where PyTorch's mean is NaN.
        loss = torch.where(divisor != 0, loss.sum() / torch.where(divisor != 0, divisor, 1.0), 0.0)
    if not stats:
        return loss
    found = _reference_stats(raw.detach(), log_probs.detach(), scaled.detach(), logit_scale)
    found["correct"] = found["argmax"] == labels
    empty = {"argmax": -1, "correct": False}
    return loss, *(torch.where(is_counted, found[name], empty.get(name, 0.0)) for name in stats)


def _reference_stats(
    raw: torch.Tensor, log_probs: torch.Tensor, scaled: torch.Tensor, logit_scale: float
) -> dict[str, torch.Tensor]:
    terms = torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0)
    # Of the logits as they are given, whose order neither cap nor rounding blurs.
    sign = (logit_scale > 0) - (logit_scale < 0)
    largest = raw * sign if sign else torch.zeros_like(raw)
    is_largest = largest == largest.amax(-1, keepdim=True)
    return {
        "logsumexp": scaled.logsumexp(-1),
        "argmax": is_largest.int().argmax(-1),  # the first one
        "entropy": -terms.sum(-1),
    }


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: float | torch.Tensor | None = None,
    inplace: bool = False,
    stats: Sequence[str] = (),
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute the cross entropy of logits and, in the same pass over them, its gradient.

    With z = softcap · tanh(logit_scale · logits / softcap) (or logit_scale · logits),
    lse = log Σ_v exp(z_v), class weights c, token weight t and smoothing ε, a row's loss is

        t · ((1 − ε) · c_label · (lse − z_label) + ε/V · Σ_v c_v · (lse − z_v) + z_loss · lse²)

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        labels: (...) int64, any strides; in [0, V) or `ignore_index`.
        class_weight: (V,) floats; not differentiable.
        token_weight: (...) floats, one per row; not differentiable.
        ignore_index: label of the rows whose loss and gradient are 0; their logits are not read.
        label_smoothing: ε in [0, 1].
        z_loss: factor of lse², ≥ 0.
        softcap: bound of the logits, > 0; None for none.
        logit_scale: factor of the logits.
        reduction: "mean" divides the sum of the losses by the sum of c_label · t over the rows
            that count (without weights: by their number), "sum", or "none".
        num_items: with "sum": a number or a 0-d tensor that divides it (tokens of all
            micro-batches, say); it is not read on the host.
        inplace: let the gradient take the memory of the logits, which hold it after the call;
            who else saved them for a backward gets an error. Where no gradient is asked for
            nothing is written. Not with fp16, reduction="none", a leaf, or a compiled call.
        stats: what to return beside the loss, one value per row and without a gradient:
            "logsumexp" (lse), "argmax" (int64, the first of equals; a NaN is never it), "correct"
            (bool, argmax is the label), "entropy" (of the softmax of z). Ignored rows have 0, −1,
            False and 0.
        backend: "auto" (Triton on CUDA, plain PyTorch on the CPU), "triton" or "reference".

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or (...) for "none"; with `stats` a tuple of
        it and each of them, in their order. Where nothing counts (no rows, all ignored, weights
        or num_items that sum to 0) mean and sum / num_items are 0 with zero gradients, where
        PyTorch's mean is NaN. Differentiable once in the logits.

    Raises:
        TypeError: a dtype that is not allowed, DTensors.
        ValueError: shapes, devices or options that do not fit; a label outside on a CPU (on CUDA
            a RuntimeError when the device gets there).

    Source: torch.nn.functional.cross_entropy; z-loss: de Brébisson and Vincent 2016, arXiv
    1604.08859; softcap: Gemma 2, arXiv 2408.00118; a softmax's sums in one pass: Milakov and
    Gimelshein 2018, arXiv 1805.02867.

    Example:
        >>> logits = torch.zeros(2, 10)
        >>> cross_entropy(logits, torch.tensor([3, -100]))
        tensor(2.3026)
    """
    _check_tensors(logits, labels, class_weight, token_weight)
    check_options(softcap, None)
    _check_options(label_smoothing, z_loss, reduction, num_items)
    stats = [stats] if isinstance(stats, str) else list(stats)
    if unknown := [name for name in stats if name not in STATS]:
        raise ValueError(f"stats={unknown}: allowed are {', '.join(STATS)}")
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    is_compiling = torch.compiler.is_compiling()
    if inplace and needs_gradient:
        _check_in_place(logits, reduction, is_compiling)
    options: dict[str, Any] = {
        "class_weight": class_weight, "token_weight": token_weight, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap,
        "logit_scale": logit_scale, "reduction": reduction, "num_items": num_items,
    }  # fmt: skip
    if not use_triton(backend, logits):
        if type(labels) is torch.Tensor and labels.is_cpu and not is_compiling:
            check_labels("cross_entropy", labels, logits.shape[-1], ignore_index)
        return reference(logits, labels, **options, stats=stats)
    if num_items is not None and not isinstance(num_items, torch.Tensor):
        num_items = torch.full((), num_items, dtype=torch.float64, device=logits.device)
    is_later = reduction == "none" or logits.dtype == torch.float16 or is_compiling
    wanted = ["argmax" if name == "correct" else name for name in stats]
    rest = (
        labels, class_weight, token_weight, num_items, ignore_index, label_smoothing, z_loss,
        softcap, logit_scale, reduction, wanted,
    )  # fmt: skip
    if inplace and needs_gradient:
        loss, *found = InPlace.apply(logits, *rest, False, False)
    else:
        now, later = needs_gradient and not is_later, needs_gradient and is_later
        loss, _, _, _, *found = forward_op(logits, *rest, now, later)
    if not stats:
        return loss
    named = dict(zip(("logsumexp", "argmax", "entropy"), found, strict=True))
    if "correct" in stats:
        named["correct"] = (named["argmax"] == labels) & (labels != ignore_index)
    return loss, *(named[name] for name in stats)


def _check_tensors(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    token_weight: torch.Tensor | None,
) -> None:
    refuse_dtensor("cross_entropy", logits, labels, class_weight, token_weight)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)}; allowed is (..., V ≥ 1)"
        )
    if logits.dtype not in FLOATS:
        raise TypeError(f"cross_entropy: logits are {logits.dtype}: allowed are {FLOATS}")
    if labels.dtype != torch.int64:
        raise TypeError(f"cross_entropy: labels are {labels.dtype}: use labels.long()")
    wanted = {
        "labels": (labels, logits.shape[:-1]),
        "class_weight": (class_weight, logits.shape[-1:]),
        "token_weight": (token_weight, logits.shape[:-1]),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != logits.device:
            raise ValueError(
                f"cross_entropy: {name} is {tuple(tensor.shape)} on {tensor.device}: for logits "
                f"{tuple(logits.shape)} on {logits.device} it must be {tuple(shape)} there"
            )
        if name != "labels" and (tensor.requires_grad or tensor.dtype not in FLOATS):
            raise ValueError(
                f"cross_entropy: {name} is {tensor.dtype}, requires_grad={tensor.requires_grad}: "
                "allowed are floats without a gradient (detach it, or multiply the loss of "
                "reduction='none')"
            )


def _check_in_place(logits: torch.Tensor, reduction: str, is_compiling: bool) -> None:
    refusals = {
        "a loss per row, whose gradient follows in the backward": reduction == "none",
        "fp16, whose gradient follows in the backward": logits.dtype == torch.float16,
        "a compiled call": is_compiling,
        "a leaf (take logits that a layer computed)": logits.is_leaf,
        "logits that are not contiguous": not logits.is_contiguous(),
    }
    if reasons := [reason for reason, is_so in refusals.items() if is_so]:
        raise ValueError(f"cross_entropy: inplace=True does not go with {', nor '.join(reasons)}")

"""The public function: checks, autocast, and the choice of the backend."""

from __future__ import annotations

from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.rows import FLOATS, accumulator
from nearlight.ops._linear_logits import autocast, check_labels, check_options, check_tensors
from nearlight.ops.linear_cross_entropy.loop import Arguments
from nearlight.ops.linear_cross_entropy.reference import reference
from nearlight.ops.linear_cross_entropy.registration import forward_op

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: float | torch.Tensor | None = None,
    memory_budget_bytes: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute the cross entropy of a linear layer's output without storing that output whole.

    With u = logit_scale · (x · weightᵀ + bias), z = softcap · tanh(u / softcap) (or u),
    lse = log Σ_v exp(z_v), class weights c, token weight t and smoothing ε, a row's loss is

        t · ((1 − ε) · c_label · (lse − z_label) + ε/V · Σ_v c_v · (lse − z_v) + z_loss · lse²)

    Args:
        x: (..., H) bf16, fp16, fp32 or fp64, any strides, CPU or CUDA.
        weight: (V, H) in the dtype and on the device of x, any strides.
        labels: (...) int64, any strides; in [0, V) or `ignore_index`.
        bias: (V,) in the dtype of x; −inf takes a class out.
        ignore_index: label of the rows whose loss and gradient are 0.
        label_smoothing: ε in [0, 1].
        z_loss: factor of lse², ≥ 0.
        softcap: bound of the logits, > 0; None for none.
        logit_scale: factor of the logits.
        class_weight: (V,) floats; not differentiable.
        token_weight: (...) floats, one per row; not differentiable.
        reduction: "mean" divides the sum of the losses by the sum of c_label · t over the rows
            that count (without weights: by their number), "sum", or "none".
        num_items: with "sum": a number or a 0-d tensor that divides it (tokens of all
            micro-batches, say); it is not read on the host.
        memory_budget_bytes: device memory for the chunk of logits and what sums the weight
            gradient; None: 512 MiB, up to 2 GiB for many rows. Plain PyTorch keeps all logits.
        backend: "auto" (Triton on CUDA, plain PyTorch on the CPU), "triton" or "reference".

    Returns:
        fp32 (fp64 for fp64): a scalar, or (...) for "none". Where nothing counts (no rows, all
        ignored, weights or num_items that sum to 0) mean and sum / num_items are 0 with zero
        gradients, where PyTorch's mean is NaN. Differentiable once in x, weight and bias.

    Raises:
        TypeError: dtypes that differ or are not allowed, DTensors.
        ValueError: shapes, devices, options or a budget that do not fit; a label outside on a
            CPU (on CUDA a RuntimeError when the device gets there).

    Source: cross entropy as torch.nn.functional.cross_entropy; z-loss: de Brébisson and Vincent
    2016, arXiv 1604.08859; softcap: Gemma 2, arXiv 2408.00118. Chunks: Wijmans et al. 2024,
    arXiv 2411.09009, name the memory; here rows are cut, not tiles.

    Example:
        >>> x, weight = torch.zeros(2, 4), torch.ones(10, 4)
        >>> linear_cross_entropy(x, weight, torch.tensor([3, -100]))
        tensor(2.3026)
    """
    x, weight, bias = autocast(x, weight, bias)
    _check_tensors(x, weight, labels, bias, class_weight, token_weight)
    check_options(softcap, memory_budget_bytes)
    _check_options(label_smoothing, z_loss, reduction, num_items)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "class_weight": class_weight,
        "token_weight": token_weight,
        "reduction": reduction,
        "num_items": num_items,
        "memory_budget_bytes": memory_budget_bytes,
    }
    if not use_triton(backend, x):
        if type(labels) is torch.Tensor and labels.is_cpu and not torch.compiler.is_compiling():
            check_labels("linear_cross_entropy", labels, weight.shape[0], ignore_index)
        return reference(x, weight, labels, bias, **options)
    if num_items is not None and not isinstance(num_items, torch.Tensor):
        dtype = accumulator(x.dtype)
        options["num_items"] = torch.full((), num_items, dtype=dtype, device=x.device)
    needs: dict[str, Any] = {
        f"needs_{name}": torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias))
    }
    arguments = Arguments(x, weight, labels, bias, **options, **needs)
    loss: torch.Tensor = forward_op(*arguments)[0]
    return loss


def _check_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    token_weight: torch.Tensor | None,
) -> None:
    per_class, per_row = {"class_weight": class_weight}, {"token_weight": token_weight}
    check_tensors("linear_cross_entropy", x, weight, labels, bias, per_class, per_row)
    for name, tensor in {**per_class, **per_row}.items():
        if tensor is not None and (tensor.requires_grad or tensor.dtype not in FLOATS):
            raise ValueError(
                f"linear_cross_entropy: {name} is {tensor.dtype}, "
                f"requires_grad={tensor.requires_grad}: allowed are floats without a gradient "
                "(detach it, or multiply the loss of reduction='none')"
            )


def _check_options(
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    num_items: float | torch.Tensor | None,
) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: allowed is 0 to 1")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss={z_loss}: allowed is 0 and more")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: allowed are {', '.join(REDUCTIONS)}")
    if num_items is None:
        return
    if reduction != "sum":
        raise ValueError(f"num_items divides a sum: use reduction='sum', not {reduction!r}")
    if isinstance(num_items, torch.Tensor):
        if num_items.ndim or num_items.requires_grad:
            raise ValueError("num_items: allowed are a number or a 0-d tensor without a gradient")
    elif num_items < 0:
        raise ValueError(f"num_items={num_items}: allowed is 0 and more")

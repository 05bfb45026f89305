"""Linear cross entropy in plain PyTorch: what the op must equal, and what it runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nearlight.core.rows import accumulator


def reference(
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
) -> torch.Tensor:
    """Compute the loss with all logits at once; arguments as in `linear_cross_entropy`.

    The logits have the dtype of x, as in a plain model; all after them is fp32 (fp64 for fp64).
    """
    del memory_budget_bytes  # a bound for chunks; here all logits exist
    is_counted = labels != ignore_index
    # A gate for the gradient, too: what NaN an ignored row's weights make ends here, as 0.
    logits = F.linear(x, weight, bias).masked_fill_(~is_counted.unsqueeze(-1), 0.0)
    dtype = accumulator(logits.dtype)
    logits = logits.to(dtype) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    target = labels.masked_fill(~is_counted, 0)
    log_probs = logits.log_softmax(-1)
    loss = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    weights = torch.ones_like(loss)
    if class_weight is not None:
        weights = class_weight.to(dtype)[target]
    loss = (1.0 - label_smoothing) * weights * loss
    if label_smoothing > 0:
        spread = log_probs if class_weight is None else log_probs * class_weight.to(dtype)
        loss = loss - label_smoothing * spread.sum(-1) / logits.shape[-1]
    if z_loss > 0:
        loss = loss + z_loss * logits.logsumexp(-1).square()
    if token_weight is not None:
        loss = loss * token_weight.to(dtype)
        weights = weights * token_weight.to(dtype)
    loss = torch.where(is_counted, loss, 0.0)
    if reduction == "none":
        return loss
    divisor = torch.ones((), dtype=dtype, device=loss.device)
    if reduction == "mean":
        divisor = torch.where(is_counted, weights, 0.0).sum()
    elif num_items is not None:
        divisor = torch.as_tensor(num_items, dtype=dtype, device=loss.device)
    # Nothing to divide by: 0 with a live graph, where PyTorch's mean is NaN.
    return torch.where(divisor != 0, loss.sum() / torch.where(divisor != 0, divisor, 1.0), 0.0)

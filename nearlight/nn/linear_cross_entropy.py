"""The loss of a linear head as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nearlight import ops


class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy of a linear head, logits never held as a whole: CE(x · Wᵀ + b, labels).

    It has the head's parameters, as `torch.nn.Linear` would (`weight`, `bias`); to share them
    with an embedding, assign: `loss.weight = embedding.weight`.

    Args:
        hidden_size: width of x.
        vocab_size: number of classes.
        bias: whether the head has a bias.
        ignore_index: label of rows that count nothing.
        label_smoothing: weight of the uniform distribution in the target.
        z_loss: factor of the squared log-sum-exp.
        softcap: cap · tanh(logits / cap) before the loss, None for none.
        logit_scale: factor of the logits.
        reduction: "mean", "sum" or "none".
        memory_budget_bytes: bound of the memory held beyond the result; sets the chunk.
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> loss = LinearCrossEntropyLoss(8, 16)
        >>> loss(torch.ones(2, 8), torch.tensor([3, 5])).shape
        torch.Size([])
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        reduction: str = "mean",
        memory_budget_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head = nn.Linear(hidden_size, vocab_size, bias, device=device, dtype=dtype)
        self.weight, self.bias = head.weight, head.bias
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "reduction": reduction,
            "memory_budget_bytes": memory_budget_bytes,
        }

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        *,
        class_weight: torch.Tensor | None = None,
        token_weight: torch.Tensor | None = None,
        num_items: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Return the loss of x (tokens, hidden_size) against labels (tokens,) int64.

        With reduction "sum" the loss is divided by `num_items`, the tokens of all micro-batches.
        """
        return ops.linear_cross_entropy(
            x,
            self.weight,
            labels,
            self.bias,
            class_weight=class_weight,
            token_weight=token_weight,
            num_items=num_items,
            **self.options,
        )

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        vocab_size, hidden_size = self.weight.shape
        return f"{hidden_size}, {vocab_size}, bias={self.bias is not None}"

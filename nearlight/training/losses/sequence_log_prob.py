"""The log-probability of each sequence from those of its tokens."""

from __future__ import annotations

import torch

from nearlight.training.losses.tokens import check_shapes, divided, under


def sequence_log_prob(
    log_probs: torch.Tensor, mask: torch.Tensor, *, average: bool = False
) -> torch.Tensor:
    """Sum the log-probabilities of each sequence's tokens: log π(y) = Σ_t mask_t log π(y_t).

    Args:
        log_probs: (B, S) floats, any strides; outside the mask they may be anything.
        mask: (B, S) bool or 0 and 1: which tokens belong to the completion.
        average: whether to divide by their number, as ORPO and IPO do; 0 without tokens.

    Returns:
        (B,) fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes that differ.
        TypeError: a mask of floats.

    Example:
        >>> labels = torch.tensor([[5, 7, -100]])
        >>> sequence_log_prob(torch.tensor([[-1.0, -3.0, 0.0]]), labels != -100, average=True)
        tensor([-2.])
    """
    check_shapes("sequence_log_prob", log_probs.shape, mask)
    total = under(mask, log_probs).sum(-1)
    return divided(total, mask.bool().sum(-1)) if average else total

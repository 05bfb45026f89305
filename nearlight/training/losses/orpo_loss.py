"""Odds ratio preference optimization."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nearlight.training.losses.tokens import check_shapes, reduced, wide


def orpo_loss(
    chosen_log_probs: torch.Tensor,
    rejected_log_probs: torch.Tensor,
    *,
    beta: float = 0.1,
    sft_weight: float = 1.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Learn the chosen completion, and raise its odds over those of the rejected one.

    −w log p_c − β log σ(log odds p_c − log odds p_r), with odds p = p / (1 − p)

    Args:
        chosen_log_probs: (B,) floats ≤ 0, averages over tokens: `sequence_log_prob(..., average=
            True)`. Those above −eps (a completion without tokens, or certain in each) are taken as
            −eps, without a gradient of their odds, which have none there that is finite.
        rejected_log_probs: (B,), likewise.
        beta: β ≥ 0, the weight of the odds (λ in the paper).
        sft_weight: w; 0 leaves that term to a cross entropy of your own (over the prompt, too).
        reduction: "mean" (0 of no pairs), "sum" or "none".

    Returns:
        A scalar in fp32 (fp64 for fp64), or (B,) for "none".

    Raises:
        ValueError: shapes that differ, or an option that is not allowed.

    Source: Hong et al. 2024, arXiv 2403.07691; log(1 − exp x): Mächler 2012, "Accurately computing
    log(1 − exp(−|a|))".

    Example:
        >>> orpo_loss(torch.tensor([-0.5]), torch.tensor([-2.0]))
        tensor(0.5097)
    """
    check_shapes("orpo_loss", chosen_log_probs.shape, rejected_log_probs=rejected_log_probs)
    if not beta >= 0.0:
        raise ValueError(f"orpo_loss: beta={beta}: allowed is 0 and more")
    chosen, rejected = wide(chosen_log_probs), wide(rejected_log_probs)
    preference = -F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    losses = beta * preference - sft_weight * chosen
    return reduced("orpo_loss", losses, reduction)


def _log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 − p)); log1p(−exp(x)) alone would be log 0 for a p that rounds to 1."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    is_near_one = log_prob > -math.log(2.0)
    # Each way sees only its own half: what the other computes there would be NaN in the gradient.
    near_one = log_prob.clamp(min=-1.0).expm1().neg().log()
    far = (-log_prob.clamp(max=-0.5).exp()).log1p()
    return log_prob - torch.where(is_near_one, near_one, far)

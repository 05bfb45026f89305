"""Kahneman-Tversky optimization."""

from __future__ import annotations

import torch

from nearlight.training.losses.tokens import check_shapes, divided, reduced, wide


def kto_loss(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    is_desirable: torch.Tensor,
    *,
    kl_log_ratios: torch.Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Learn from completions that are each marked as desirable or not, without pairs.

    With r = log π/π_ref and z = max(0, mean of kl_log_ratios), which gets no gradient:

        desirable    λ_D (1 − σ(β (r − z)))
        undesirable  λ_U (1 − σ(β (z − r)))

    Args:
        log_probs: (B,) floats, as `sequence_log_prob` gives them.
        ref_log_probs: (B,) of the reference model.
        is_desirable: (B,) bool; all of one kind will do.
        kl_log_ratios: r of prompts with completions of other prompts, any shape: their mean
            estimates the KL divergence (across ranks: pass the mean over all of them). None, or
            nothing in it: z = 0.
        beta: β > 0.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
        reduction: "mean" (over all B, 0 of none), "sum" or "none".

    Returns:
        A scalar in fp32 (fp64 for fp64), or (B,) for "none".

    Raises:
        ValueError: shapes that differ, or an option that is not allowed.
        TypeError: `is_desirable` is not bool.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, with its authors' own estimate of z.

    Example:
        >>> log_probs = torch.tensor([-9.0, -12.0])
        >>> kto_loss(log_probs, torch.tensor([-10.0, -10.0]), torch.tensor([True, False]))
        tensor(0.4626)
    """
    check_shapes(
        "kto_loss", log_probs.shape, ref_log_probs=ref_log_probs, is_desirable=is_desirable
    )
    if is_desirable.dtype != torch.bool:
        raise TypeError(f"kto_loss: is_desirable is {is_desirable.dtype}: use is_desirable.bool()")
    if not beta > 0.0:
        raise ValueError(f"kto_loss: beta={beta}: allowed are numbers above 0")
    ratios = wide(log_probs) - wide(ref_log_probs)
    if kl_log_ratios is not None:
        kl = kl_log_ratios.detach().to(ratios)
        ratios = ratios - divided(kl.sum(), kl.numel()).clamp(min=0.0)
    # 1 − σ(t) as σ(−t): for a large t the difference would be 0.
    losses = torch.where(
        is_desirable,
        desirable_weight * torch.sigmoid(-beta * ratios),
        undesirable_weight * torch.sigmoid(beta * ratios),
    )
    return reduced("kto_loss", losses, reduction)

"""Group relative policy optimization, and how DAPO, Dr. GRPO and GSPO change it."""

from __future__ import annotations

import torch

from nearlight.training.losses.kl_penalty import kl_penalty
from nearlight.training.losses.tokens import (
    check_clip,
    check_entropy,
    check_shapes,
    clipped_objective,
    divided,
    token_count,
    under,
)

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
LEVELS = ("token", "sequence")


def grpo_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_level: str = "token",
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    num_items: float | torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    entropy_weight: float = 0.0,
) -> torch.Tensor:
    """Raise the probability of tokens with a positive advantage, within a clipped range.

    With r = π/π_old (its geometric mean over the sequence for importance_level="sequence", GSPO), a
    token's loss is

        −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) + β KL − c · entropy

    and they are summed over the tokens of the mask like this:

        grpo      the mean of the sequences' means
        bnpo      divided by the number of tokens
        dapo      likewise, or by `num_items`: so micro-batches add up to their batch
        dr_grpo   divided by B · max_completion_length

    Args:
        log_probs: (B, S) floats, as `nearlight.ops.linear_log_prob` gives them.
        advantages: (B,), or (B, S) for one per token.
        mask: (B, S) bool or 0 and 1: the tokens that count; elsewhere all may hold anything.
        old_log_probs: (B, S) of the policy that sampled; None where it is this one: r = 1, with the
            gradient of r.
        ref_log_probs: (B, S) of the reference model; needed for β > 0.
        beta: β ≥ 0.
        kl_estimator: "k1", "k2" or "k3", see `kl_penalty`.
        epsilon_low: ε_low within [0, 1].
        epsilon_high: ε_high ≥ 0; larger than ε_low is DAPO's "clip higher".
        delta: bound of r also where A < 0 (two-sided clipping), above 1 + ε_high; None for none.
        importance_level: "token" or "sequence".
        loss_type: one of the four above.
        max_completion_length: the constant of "dr_grpo".
        num_items: for "dapo": tokens that count in all micro-batches, a number or 0-d tensor.
        entropy: (B, S), from `linear_log_prob(..., return_entropy=True)`.
        entropy_weight: c; needs `entropy`.

    Returns:
        A scalar in fp32 (fp64 for fp64); 0 with zero gradients where nothing counts. A sequence
        without tokens counts as 0 among the means of "grpo". Past log r = 20 the ratio goes on
        along its tangent, so that it and its gradient stay finite.

    Raises:
        ValueError: shapes that differ, an option that is not allowed or lacks what it needs.
        TypeError: a mask of floats.

    Source: Shao et al. 2024, arXiv 2402.03300; DAPO: arXiv 2503.14476; Dr. GRPO: arXiv 2503.20783;
    GSPO: arXiv 2507.18071; delta: INTELLECT-2, arXiv 2505.07291. Names of TRL's GRPOTrainer.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True)
        >>> mask = torch.tensor([[True, True, False]])
        >>> grpo_loss(log_probs, torch.tensor([1.0]), mask).backward()
        >>> log_probs.grad
        tensor([[-0.5000, -0.5000,  0.0000]])
    """
    advantages = _per_token(advantages, log_probs)
    check_shapes(
        "grpo_loss",
        log_probs.shape,
        mask,
        advantages=advantages,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        entropy=entropy,
    )
    check_clip("grpo_loss", epsilon_low, epsilon_high, delta)
    check_entropy("grpo_loss", entropy, entropy_weight)
    _check_options(importance_level, loss_type, max_completion_length, num_items)
    if not beta >= 0.0 or (beta > 0.0) != (ref_log_probs is not None):
        raise ValueError(
            f"grpo_loss: beta={beta} {'without' if ref_log_probs is None else 'with'} "
            "ref_log_probs: allowed is β > 0 with them, or 0 without"
        )
    log_probs, advantages = under(mask, log_probs), under(mask, advantages)
    old = log_probs.detach() if old_log_probs is None else under(mask, old_log_probs)
    log_ratio = log_probs - old
    lengths = mask.bool().sum(-1)
    if importance_level == "sequence":
        log_ratio = divided(log_ratio.sum(-1), lengths).unsqueeze(-1).expand(log_probs.shape)
    losses = clipped_objective(log_ratio, advantages, epsilon_low, epsilon_high, delta)
    if ref_log_probs is not None:
        penalty = kl_penalty(log_probs, under(mask, ref_log_probs), estimator=kl_estimator)
        losses = losses + beta * penalty
    if entropy is not None:
        losses = losses - entropy_weight * under(mask, entropy)
    if loss_type == "grpo":
        return divided(divided(losses.sum(-1), lengths).sum(), float(losses.shape[0]))
    if loss_type == "dr_grpo":
        assert max_completion_length is not None
        return divided(losses.sum(), float(losses.shape[0] * max_completion_length))
    return divided(losses.sum(), token_count("grpo_loss", mask, num_items))


def _per_token(advantages: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Return one advantage per token where there is one per sequence."""
    if log_probs.ndim != 2:
        raise ValueError(
            f"grpo_loss: log_probs are {tuple(log_probs.shape)}: allowed is (B, S); a packed batch "
            "is (1, S) with advantages per token"
        )
    if advantages.shape != log_probs.shape[:1]:
        return advantages
    return advantages.unsqueeze(-1).expand(log_probs.shape)


def _check_options(
    importance_level: str,
    loss_type: str,
    max_completion_length: int | None,
    num_items: float | torch.Tensor | None,
) -> None:
    if importance_level not in LEVELS:
        raise ValueError(
            f"grpo_loss: importance_level={importance_level!r}: allowed are {', '.join(LEVELS)}"
        )
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"grpo_loss: loss_type={loss_type!r}: allowed are {', '.join(LOSS_TYPES)}")
    if (loss_type == "dr_grpo") != (max_completion_length is not None):
        raise ValueError(
            f"grpo_loss: max_completion_length={max_completion_length} with {loss_type!r}: it is "
            "the constant that 'dr_grpo' divides by, and needed for it alone"
        )
    if max_completion_length is not None and max_completion_length < 1:
        raise ValueError(
            f"grpo_loss: max_completion_length={max_completion_length}: allowed is 1 and more"
        )
    if num_items is not None and loss_type != "dapo":
        raise ValueError(f"grpo_loss: num_items divides 'dapo' alone, not {loss_type!r}")

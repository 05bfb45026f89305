"""Proximal policy optimization."""

from __future__ import annotations

import torch

from nearlight.training.losses.tokens import (
    check_clip,
    check_entropy,
    check_shapes,
    clipped_objective,
    divided,
    token_count,
    under,
)


def ppo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    values: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    value_epsilon: float = 0.2,
    value_weight: float = 0.1,
    entropy: torch.Tensor | None = None,
    entropy_weight: float = 0.0,
    num_items: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Improve the policy within a clipped range, and the value function with it.

    With r = π/π_old, V' = V_old + clip(V − V_old, ±ε_V), the mean over the tokens of the mask of

        −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) + v/2 · max((V − R)², (V' − R)²) − c · entropy

    A KL penalty belongs into the rewards: see `kl_penalty`.

    Args:
        log_probs: (B, S) floats, as `nearlight.ops.linear_log_prob` gives them.
        old_log_probs: (B, S) of the policy that sampled.
        advantages: (B, S), one per token.
        mask: (B, S) bool or 0 and 1: the tokens that count; elsewhere all may hold anything.
        epsilon_low: ε_low within [0, 1].
        epsilon_high: ε_high ≥ 0.
        delta: bound of r also where A < 0 (dual clip), above 1 + ε_high; None for none.
        values: V, (B, S); None leaves that term out.
        old_values: V_old, (B, S), needed with `values`.
        returns: R, (B, S), needed with `values`.
        value_epsilon: ε_V ≥ 0.
        value_weight: v.
        entropy: (B, S), from `linear_log_prob(..., return_entropy=True)`.
        entropy_weight: c; needs `entropy`.
        num_items: what the sum is divided by in place of the mask's tokens: those of all
            micro-batches, a number or 0-d tensor.

    Returns:
        A scalar in fp32 (fp64 for fp64); 0 with zero gradients where nothing counts. Past log r =
        20 the ratio goes on along its tangent, so that it and its gradient stay finite.

    Raises:
        ValueError: shapes that differ, an option that is not allowed or lacks what it needs.
        TypeError: a mask of floats.

    Source: Schulman et al. 2017, arXiv 1707.06347; delta: Ye et al. 2020, arXiv 1912.09729.

    Example:
        >>> log_probs, mask = torch.tensor([[-1.0, 0.0]]), torch.tensor([[True, False]])
        >>> ppo_loss(log_probs, log_probs - 1.0, torch.ones(1, 2), mask)
        tensor(-1.2000)
    """
    of_values = {"values": values, "old_values": old_values, "returns": returns}
    check_shapes(
        "ppo_loss",
        log_probs.shape,
        mask,
        old_log_probs=old_log_probs,
        advantages=advantages,
        entropy=entropy,
        **of_values,
    )
    check_clip("ppo_loss", epsilon_low, epsilon_high, delta)
    check_entropy("ppo_loss", entropy, entropy_weight)
    if len({tensor is None for tensor in of_values.values()}) > 1:
        missing = [name for name, tensor in of_values.items() if tensor is None]
        raise ValueError(f"ppo_loss: {', '.join(missing)} missing: pass all of {[*of_values]}")
    if not value_epsilon >= 0.0:
        raise ValueError(f"ppo_loss: value_epsilon={value_epsilon}: allowed is 0 and more")
    log_ratio = under(mask, log_probs) - under(mask, old_log_probs)
    losses = clipped_objective(log_ratio, under(mask, advantages), epsilon_low, epsilon_high, delta)
    if values is not None and old_values is not None and returns is not None:
        new, old, target = (under(mask, tensor) for tensor in (values, old_values, returns))
        near = old + (new - old).clamp(-value_epsilon, value_epsilon)
        squares = torch.maximum((new - target).square(), (near - target).square())
        losses = losses + 0.5 * value_weight * squares
    if entropy is not None:
        losses = losses - entropy_weight * under(mask, entropy)
    return divided(losses.sum(), token_count("ppo_loss", mask, num_items))

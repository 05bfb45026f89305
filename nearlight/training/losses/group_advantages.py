"""Advantages of completions over the others of their prompt."""

from __future__ import annotations

import torch

from nearlight.training.losses.tokens import wide

SCALES = ("group", "batch", "none")
# Beside a deviation of 1: keeps groups of nearly equal rewards from being blown up.
EPSILON = 1e-4


def group_advantages(
    rewards: torch.Tensor, group_size: int, *, scale: str = "group"
) -> torch.Tensor:
    """Compare each reward with its group: A = (r − mean r) / (std r + 1e-4).

    Args:
        rewards: (B,) floats; the completions of a prompt stand together.
        group_size: completions of each prompt, ≥ 1; a group of one has the advantage 0.
        scale: which deviation divides: of the "group" (GRPO), of the whole "batch" (Lite PPO), or
            "none", which does not favour prompts that are too hard or too easy (Dr. GRPO).

    Returns:
        (B,) fp32 (fp64 for fp64), without a gradient; equal rewards give 0.

    Raises:
        ValueError: rewards that do not fill their groups, or another scale.

    Source: Shao et al. 2024, arXiv 2402.03300; Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783; Liu et
    al. 2025 (Lite PPO), arXiv 2508.08221.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2, scale="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    if rewards.ndim != 1 or group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_advantages: rewards are {tuple(rewards.shape)} and group_size={group_size}: "
            "allowed are (B,) with B a multiple of group_size ≥ 1"
        )
    if scale not in SCALES:
        raise ValueError(f"group_advantages: scale={scale!r}: allowed are {', '.join(SCALES)}")
    rewards = wide(rewards.detach())
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(-1, keepdim=True)
    if scale == "group":
        advantages = advantages / (_deviation(groups) + EPSILON)
    elif scale == "batch":
        advantages = advantages / (_deviation(rewards) + EPSILON)
    return advantages.flatten()


def _deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Return the deviation along the last dimension; 0 of one reward, where torch.std is NaN."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / max(rewards.shape[-1] - 1, 1)
    return variance.sqrt()

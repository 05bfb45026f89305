"""Estimates of the KL divergence from the log-probabilities of what was sampled."""

from __future__ import annotations

import torch

from nearlight.training.losses.tokens import bounded_expm1, check_shapes, wide

ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, estimator: str = "k3"
) -> torch.Tensor:
    """Estimate KL(π || π_ref) of each token that π sampled.

    With d = log π_ref − log π: k1 = −d, k2 = d² / 2, k3 = exp(d) − 1 − d.

    In the mean k1 and k3 are the divergence. As a loss k1 has the mean gradient 0, k2 has that of
    KL(π || π_ref), and k3 that of KL(π_ref || π): put k1 into the reward, k2 or k3 into the loss.

    Args:
        log_probs: floats of any shape.
        ref_log_probs: as many, of the reference model.
        estimator: "k1", "k2" or "k3".

    Returns:
        fp32 (fp64 for fp64) in their shape. Past d = 20 k3 goes on along its tangent, so that it
        and its gradient stay finite.

    Raises:
        ValueError: shapes that differ, or another estimator.

    Source: Schulman 2020, "Approximating KL divergence"; k3 in a loss: GRPO, arXiv 2402.03300.

    Example:
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([0.3679])
    """
    check_shapes("kl_penalty", log_probs.shape, ref_log_probs=ref_log_probs)
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"kl_penalty: estimator={estimator!r}: allowed are {', '.join(ESTIMATORS)}"
        )
    difference = wide(ref_log_probs) - wide(log_probs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return bounded_expm1(difference) - difference

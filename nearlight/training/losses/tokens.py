"""What the losses share: checks, numbers under a mask, ratios that stay finite, reductions."""

from __future__ import annotations

from math import exp

import torch

# Where a ratio of probabilities is 5e8 and no estimate means anything: from here on its tangent.
LARGEST_LOG_RATIO = 20.0
REDUCTIONS = ("mean", "sum", "none")


def check_shapes(
    loss: str, shape: torch.Size, mask: torch.Tensor | None = None, **tensors: torch.Tensor | None
) -> None:
    """Raise unless the tensors that are given have a shape, and the mask is one."""
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        raise TypeError(f"{loss}: mask is {mask.dtype}: allowed are bool and integers: mask > 0")
    for name, tensor in {"mask": mask, **tensors}.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{loss}: {name} is {tuple(tensor.shape)}: it must be {tuple(shape)}, as the first "
                "log-probabilities are"
            )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in fp32, or fp64 where it is that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def under(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a wide tensor, 0 outside the mask.

    A selection, not a product: padding may hold NaN or −inf, in values and gradients.
    """
    return torch.where(mask.bool(), wide(tensor), 0.0)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), and past `LARGEST_LOG_RATIO` its tangent there.

    An infinite ratio, clipped, would leave 0 · inf = NaN in the gradient; a ratio that is cut off
    would leave none, just where the policy has strayed most.
    """
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return bounded.exp() * (1.0 + (log_ratio - LARGEST_LOG_RATIO).relu())


def bounded_expm1(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return `bounded_exp` − 1, which near 0 keeps its digits."""
    beyond = (log_ratio - LARGEST_LOG_RATIO).relu()
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).expm1() + exp(LARGEST_LOG_RATIO) * beyond


def divided(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """Return total / count, and 0 with a live graph where there is nothing to divide by."""
    if not isinstance(count, torch.Tensor):
        return total / count if count > 0 else 0.0 * total
    count = count.to(total.device, total.dtype)
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0 * total)


def token_count(
    loss: str, mask: torch.Tensor, num_items: float | torch.Tensor | None
) -> torch.Tensor | float:
    """Return what a sum over tokens is divided by: `num_items`, or the tokens of the mask."""
    if num_items is None:
        return mask.bool().sum()
    if isinstance(num_items, torch.Tensor):
        if num_items.ndim or num_items.requires_grad:
            raise ValueError(
                f"{loss}: num_items: allowed are a number or a 0-d tensor without a gradient"
            )
    elif num_items < 0:
        raise ValueError(f"{loss}: num_items={num_items}: allowed is 0 and more")
    return num_items


def check_entropy(loss: str, entropy: torch.Tensor | None, entropy_weight: float) -> None:
    """Raise for an entropy without a weight, and for a weight without one."""
    if (entropy_weight != 0.0) != (entropy is not None):
        raise ValueError(
            f"{loss}: entropy_weight={entropy_weight} {'without' if entropy is None else 'with'} "
            "entropy: allowed is a weight with one, or 0 without"
        )


def clipped_objective(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> torch.Tensor:
    """Return −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(log_ratio), at most delta."""
    ratio = bounded_exp(log_ratio)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def check_clip(loss: str, epsilon_low: float, epsilon_high: float, delta: float | None) -> None:
    """Raise for a range that does not hold 1, or a bound inside it."""
    if not 0.0 <= epsilon_low <= 1.0 or not epsilon_high >= 0.0:
        raise ValueError(
            f"{loss}: epsilon_low={epsilon_low}, epsilon_high={epsilon_high}: allowed are 0 to 1, "
            "and 0 and more"
        )
    if delta is not None and not delta > 1.0 + epsilon_high:
        raise ValueError(f"{loss}: delta={delta}: allowed is more than 1 + epsilon_high, or None")


def reduced(loss: str, losses: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the mean of a loss per sequence (0 of none), their sum, or all of them."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{loss}: reduction={reduction!r}: allowed are {', '.join(REDUCTIONS)}")
    if reduction == "none":
        return losses
    return losses.sum() / (max(losses.numel(), 1) if reduction == "mean" else 1)

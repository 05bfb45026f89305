"""Muon with the interface of `torch.optim.Muon`; matrices of one shape are multiplied at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from nearlight.core.rows import refuse_dtensor
from nearlight.training.steps import GroupwiseOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = (None, "original", "match_rms_adamw")
# Updates of one shape that are stacked at once: as many as are held twice beside the parameters.
MAX_STACK_ELEMENTS = 1 << 28


class Muon(GroupwiseOptimizer):
    """Momentum whose update is made orthogonal by Newton-Schulz steps in bf16.

    m = μ m + (1 − μ) g        u = g + μ (m − g), or m without Nesterov
    X = u / ‖u‖, then k times: A = X Xᵀ, X = a X + (b A + c A²) X
    p = (1 − lr λ) p − lr r X, where r follows from the shape of p

    Args:
        params: matrices or groups of them, any float dtype and strides, CPU or CUDA.
        lr: learning rate, or a tensor of one number, which is read on its device.
        weight_decay: λ.
        momentum: μ.
        nesterov: whether the update looks ahead.
        ns_coefficients: a, b and c.
        eps: least norm that is divided by.
        ns_steps: k, below 100.
        adjust_lr_fn: "original" (or None) for r = √max(1, rows / columns), "match_rms_adamw" for
            0.2 √max(rows, columns).

    Raises:
        ValueError: a number out of range, or a parameter that is no matrix.
        TypeError: a DTensor: its norm and products are of all shards.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024;
    Liu et al., "Muon is Scalable for LLM Training", 2025 (arXiv:2502.16982).

    Example:
        >>> import torch
        >>> from nearlight.training import Muon
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = Muon([weight], lr=0.5, weight_decay=0.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool(weight.detach().diagonal().max() < 1)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise unless a group's options are allowed and its parameters matrices."""
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"Muon: lr has {lr.numel()} numbers; allowed is one")
        numbers = ["weight_decay", "momentum", "eps"]
        for name in numbers if isinstance(lr, torch.Tensor) else ["lr", *numbers]:
            if not group[name] >= 0:
                raise ValueError(f"Muon: {name}={group[name]}; allowed is 0 and more")
        if not 0 <= group["ns_steps"] < 100 or len(group["ns_coefficients"]) != 3:
            raise ValueError(
                f"Muon: ns_steps={group['ns_steps']}, ns_coefficients={group['ns_coefficients']}; "
                "allowed are fewer than 100 steps and three coefficients"
            )
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(
                f"Muon: adjust_lr_fn={group['adjust_lr_fn']!r}; allowed are {ADJUSTMENTS}"
            )
        for param in group["params"]:
            refuse_dtensor("Muon", param)
            if param.ndim != 2 or not param.is_floating_point():
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(param.shape)} and {param.dtype}; allowed "
                    "are matrices of floats: give vectors and embeddings to AdamW"
                )

    def step_group(self, group: dict[str, Any]) -> None:
        """Step along the gradients of a group: matrices alike share their products."""
        alike: dict[Any, list[torch.Tensor]] = {}
        for param in group["params"]:
            if param.grad is None or not param.numel():
                continue
            if param.grad.is_sparse:
                raise TypeError("Muon: a sparse gradient; allowed are dense ones")
            key = (param.shape, param.dtype, param.grad.dtype, param.device)
            alike.setdefault(key, []).append(param)
        for params in alike.values():
            count = max(1, MAX_STACK_ELEMENTS // params[0].numel())
            for start in range(0, len(params), count):
                self._step_alike(group, params[start : start + count])

    def _step_alike(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Take the step for matrices of one shape."""
        grads = [param.grad for param in params if param.grad is not None]
        momentum = group["momentum"]
        for param, grad in zip(params, grads, strict=True):
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        x = orthogonalized(updates, group["ns_coefficients"], group["eps"], group["ns_steps"])
        lr, ratio = group["lr"], _ratio(params[0].shape, group["adjust_lr_fn"])
        if isinstance(lr, torch.Tensor):
            lr = lr.to(params[0].device, non_blocking=True)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(params, [each * (lr * ratio) for each in x])
        else:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, list(x.unbind()), alpha=-lr * ratio)


def orthogonalized(
    updates: Sequence[torch.Tensor],
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    steps: int = 5,
) -> torch.Tensor:
    """Return matrices of one shape with their singular values brought near 1, in bf16.

    Args:
        updates: (rows, columns) each, any float dtype.
        coefficients: of the quintic step.
        eps: least norm that is divided by.
        steps: how many.

    Returns:
        (matrices, rows, columns) in bf16, a view where the matrices are tall.
    """
    a, b, c = coefficients
    rows, columns = updates[0].shape
    shape = (len(updates), min(rows, columns), max(rows, columns))
    x = torch.empty(shape, dtype=torch.bfloat16, device=updates[0].device)
    for place, update in zip(x.unbind(), updates, strict=True):
        place.copy_(update.T if rows > columns else update)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


def _ratio(shape: torch.Size, adjustment: str | None) -> float:
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1, rows / columns))

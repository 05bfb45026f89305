"""RMSNorm as a module."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from nearlight import ops


class RMSNorm(nn.Module):
    """Scale each row to root mean square 1, then by a weight: y = x · rsqrt(mean(x²) + eps) · w.

    The state dict is that of `torch.nn.RMSNorm` and of every transformers RMSNorm (`weight`).

    Args:
        dim: width of a row, the last dimension of the input.
        eps: added to the mean square.
        offset: added to the weight; 1.0 for Gemma, whose weights are stored around 0.
        casting: "llama" rounds before the weight is applied, "gemma" after; "none" is torch's own.
        elementwise_affine: False leaves the weight out.
        device: where the weight is made.
        dtype: of the weight.

    Example:
        >>> RMSNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: Literal["llama", "gemma", "none"] = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.offset, self.casting = dim, eps, offset, casting
        # The weight that does nothing: 1, less what is added to it anyway.
        initial = torch.full((dim,), 1.0 - offset, device=device, dtype=dtype)
        self.weight = nn.Parameter(initial) if elementwise_affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x of shape (..., dim) over its last dimension."""
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.dim}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"

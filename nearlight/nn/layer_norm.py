"""LayerNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from nearlight import ops


class LayerNorm(nn.Module):
    """Normalize each row to mean 0 and variance 1: y = (x − mean) · rsqrt(var + eps) · w + b.

    The state dict is that of `torch.nn.LayerNorm` over one dimension (`weight`, `bias`).

    Args:
        dim: width of a row, the last dimension of the input.
        eps: added to the variance.
        elementwise_affine: False leaves weight and bias out.
        bias: False leaves the bias out.
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> LayerNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        ones = torch.ones(dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if elementwise_affine and bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x of shape (..., dim) over its last dimension."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.dim}, eps={self.eps}, bias={self.bias is not None}"

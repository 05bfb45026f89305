"""The SwiGLU feed-forward block as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nearlight import ops


class SwiGLUMLP(nn.Module):
    """Feed forward through a SiLU gate: y = down(silu(gate(x)) · up(x)).

    The state dict is that of Llama's MLP in transformers (`gate_proj`, `up_proj`, `down_proj`).

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between.
        bias: whether the three projections have a bias.
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> SwiGLUMLP(8, 16)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, **at)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, **at)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, **at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x of shape (..., hidden_size) to the same shape."""
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))

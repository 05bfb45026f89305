"""Rotary position embedding as a module."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from nearlight import ops


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch long waves (arXiv:2407.21783): `rope_type` "llama3"."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Return the scaled frequencies: long waves divided, short kept, between interpolated."""
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position_embeddings / (2 * math.pi / inv_freq)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq


class RotaryEmbedding(nn.Module):
    """Turn pairs of channels of q and k by angles that grow with the position (arXiv:2104.09864).

    Channel i is paired with channel i + rotary_dim / 2, as in Llama; nothing is in the state dict.

    Args:
        rotary_dim: how many leading channels of a head turn.
        theta: base of the wave lengths.
        scaling: of the frequencies for long contexts, None for none.

    Raises:
        ValueError: rotary_dim is odd or not positive.

    Example:
        >>> q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8)
        >>> [tuple(t.shape) for t in RotaryEmbedding(8)(q, k, torch.arange(3)[None])]
        [(1, 2, 3, 8), (1, 1, 3, 8)]
    """

    inv_freq: torch.Tensor

    def __init__(
        self, rotary_dim: int, theta: float = 10_000.0, scaling: Llama3Scaling | None = None
    ) -> None:
        super().__init__()
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(
                f"rotary_dim={rotary_dim}: channels turn in pairs, give an even number"
            )
        self.rotary_dim, self.theta = rotary_dim, theta
        inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        if scaling is not None:
            inv_freq = scaling.apply(inv_freq)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def tables(
        self, position_ids: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of shape (batch, seq, rotary_dim) for positions (batch, seq).

        Angles are computed in fp32 whatever the model's dtype: bf16 has no room for positions.
        """
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn q and k of shape (batch, heads, seq, head_dim) by positions (batch, seq)."""
        cos, sin = self.tables(position_ids, q.dtype)
        return ops.rope(q, k, cos, sin, rotary_dim=self.rotary_dim)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.rotary_dim}, theta={self.theta}"

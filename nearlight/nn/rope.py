"""Rotary position embedding as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nearlight import ops
from nearlight.ops.rope.tables import rope_frequencies


class RotaryEmbedding(nn.Module):
    """Turn pairs of channels of q and k by angles that grow with the position (arXiv:2104.09864).

    Channel i is paired with channel i + rotary_dim / 2, as in Llama; nothing is in the state dict.
    The frequencies lie on the module's device, so a CUDA graph may hold the whole of it.

    Args:
        rotary_dim: how many leading channels of a head turn.
        theta: base of the wave lengths.
        scaling: of the frequencies for long contexts: the rope_type "linear", "yarn" or "llama3"
            and its keys, as in `nearlight.ops.rope_tables`; None for none.

    Raises:
        ValueError: rotary_dim is odd or not positive, or the scaling does not fit, or goes by the
            positions or several axes of them: `nearlight.ops.rope_tables` has these.

    Example:
        >>> q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8)
        >>> [tuple(t.shape) for t in RotaryEmbedding(8)(q, k, torch.arange(3)[None])]
        [(1, 2, 3, 8), (1, 1, 3, 8)]
    """

    inv_freq_bits: torch.Tensor

    def __init__(
        self, rotary_dim: int, theta: float = 10_000.0, scaling: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim={rotary_dim}: channels turn in pairs: give an even one")
        self.rotary_dim, self.theta, self.scaling = rotary_dim, theta, dict(scaling or {})
        if there := self.scaling.keys() & {"rope_theta", "partial_rotary_factor", "mrope_section"}:
            raise ValueError(
                f"scaling holds {', '.join(sorted(there))}: give RotaryEmbedding theta and, as "
                "rotary_dim, the channels that turn; tables for several axes are made by "
                "nearlight.ops.rope_tables"
            )
        inv_freq, self.attention_factor = rope_frequencies(rotary_dim, theta, self.scaling)
        # Bits, so that the model's `.to(dtype)` moves them and does not round them.
        self.register_buffer("inv_freq_bits", inv_freq.view(torch.int32), persistent=False)

    @property
    def inv_freq(self) -> torch.Tensor:
        """Angle per position of each pair, (rotary_dim / 2,), fp32 whatever the model's dtype."""
        return self.inv_freq_bits.view(torch.float32)

    def tables(
        self, position_ids: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of shape (batch, seq, rotary_dim) for positions (batch, seq).

        Angles are computed in fp32 whatever the model's dtype: bf16 has no room for positions.
        """
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        factor = self.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn q and k of shape (batch, heads, seq, head_dim) by positions (batch, seq)."""
        cos, sin = self.tables(position_ids, q.dtype)
        return ops.rope(q, k, cos, sin, rotary_dim=self.rotary_dim)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        scaling = f", {self.scaling['rope_type']}" if "rope_type" in self.scaling else ""
        return f"{self.rotary_dim}, theta={self.theta}{scaling}"

"""Llama, readable in one sitting: what the ops are for.

B batch, S sequence, E hidden, H heads, G key-value heads, D head size, V vocabulary.
Parameter names are those of transformers without the prefix "model.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nearlight import ops
from nearlight.nn.rms_norm import RMSNorm
from nearlight.nn.rope import RotaryEmbedding
from nearlight.nn.swiglu import SwiGLUMLP


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    is_tied: bool = False

    @classmethod
    def from_transformers(cls, config: Any) -> LlamaConfig:
        """Read a `transformers.LlamaConfig`.

        Raises:
            ValueError: the config is of another model, activation or rotary scaling.
        """
        rope = config.rope_parameters
        for name, found, allowed in (
            ("model_type", config.model_type, ("llama",)),
            ("hidden_act", config.hidden_act, ("silu",)),
            ("rope_type", rope["rope_type"], ("default", "linear", "yarn", "llama3")),
        ):
            if found not in allowed:
                raise ValueError(f"{name}={found!r}: Llama here knows {', '.join(allowed)}")
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            rope_scaling=None if rope["rope_type"] == "default" else scaling,
            has_attention_bias=config.attention_bias,
            has_mlp_bias=config.mlp_bias,
            is_tied=config.tie_word_embeddings,
        )


class Attention(nn.Module):
    """Causal attention whose H query heads share G key-value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        hidden, bias = config.hidden_size, config.has_attention_bias
        self.q_proj = nn.Linear(hidden, width, bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias)
        self.o_proj = nn.Linear(width, hidden, bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Mix x (B, S, E) along S; cos and sin are (B, S, D)."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, S, D)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = ops.rope(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLUMLP(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map the stream x (B, S, E) to itself."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A causal language model of the Llama architecture (arXiv:2302.13971, 2407.21783).

    It trains and scores whole sequences; it has no cache and no padding mask.

    Args:
        config: sizes and constants.

    Example:
        >>> sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        >>> llama = Llama(LlamaConfig(97, 64, 128, **sizes))
        >>> llama(torch.zeros(1, 5, dtype=torch.int64)).shape
        torch.Size([1, 5, 97])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def from_transformers(cls, model: nn.Module) -> Llama:
        """Make a Llama with a copy of the weights of a `transformers.LlamaForCausalLM`."""
        config = LlamaConfig.from_transformers(model.config)
        weights = from_transformers_names(model.state_dict())
        with torch.device("meta"):  # no time for random weights that are replaced at once
            llama = cls(config)
        llama.load_state_dict({name: w.clone() for name, w in weights.items()}, assign=True)
        llama.rotary_emb.to(llama.embed_tokens.weight.device)  # its numbers were made all the same
        if config.is_tied:
            llama.lm_head.weight = llama.embed_tokens.weight
        return llama.train(model.training)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits (B, S, V) of input_ids (B, S), or with labels (B, S) the mean loss, fp32.

        Labels are shifted inside, as transformers does: token i predicts label i + 1, and label
        −100 counts nothing. Positions count from 0 unless given.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb.tables(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if labels is None:
            return self.lm_head(x)
        x = x[:, :-1].flatten(0, 1)
        return ops.linear_cross_entropy(x, self.lm_head.weight, labels[:, 1:].flatten())


def from_transformers_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Map a state dict of `transformers.LlamaForCausalLM` to the names used here."""
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}

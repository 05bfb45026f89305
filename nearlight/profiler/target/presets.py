"""Models by name: public configuration numbers of well-known causal language models.

Each row is what the model's published `config.json` says; the parameter count is the published
one (tied embeddings counted once) and is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A model's public configuration.

    Attributes:
        config_class: transformers' configuration class.
        values: its arguments.
        num_parameters: published count.
        source: repository whose `config.json` the numbers are.
        attention: transformers' attention implementation; "eager" only where SDPA would compute
            something else (Gemma 2's softcap).
    """

    config_class: str
    values: Mapping[str, Any]
    num_parameters: int
    source: str
    attention: str = "sdpa"


def _decoder(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    *,
    tied: bool,
    eps: float = 1e-5,
    rope: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "tie_word_embeddings": tied,
        "rms_norm_eps": eps,
        **others,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}


# fmt: off
PRESETS: dict[str, Preset] = {
    "smollm2-135m": Preset(
        "LlamaConfig", _decoder(576, 1536, 30, 9, 3, 49152, 8192, 1e5, tied=True),
        134_515_008, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2-360m": Preset(
        "LlamaConfig", _decoder(960, 2560, 32, 15, 5, 49152, 8192, 1e5, tied=True),
        361_821_120, "HuggingFaceTB/SmolLM2-360M"),
    "smollm2-1.7b": Preset(
        "LlamaConfig", _decoder(2048, 8192, 24, 32, 32, 49152, 8192, 1.3e5, tied=True),
        1_711_376_384, "HuggingFaceTB/SmolLM2-1.7B"),
    "smollm3-3b": Preset(
        "SmolLM3Config",
        _decoder(2048, 11008, 36, 16, 4, 128256, 65536, 5e6, tied=True, eps=1e-6,
                 no_rope_layer_interval=4),
        3_075_098_624, "HuggingFaceTB/SmolLM3-3B"),
    "llama-3.2-1b": Preset(
        "LlamaConfig",
        _decoder(2048, 8192, 16, 32, 8, 128256, 131072, 5e5, tied=True, rope=_llama3_rope(32.0),
                 head_dim=64),
        1_235_814_400, "meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": Preset(
        "LlamaConfig",
        _decoder(3072, 8192, 28, 24, 8, 128256, 131072, 5e5, tied=True, rope=_llama3_rope(32.0),
                 head_dim=128),
        3_212_749_824, "meta-llama/Llama-3.2-3B"),
    "llama-3.1-8b": Preset(
        "LlamaConfig",
        _decoder(4096, 14336, 32, 32, 8, 128256, 131072, 5e5, tied=False, rope=_llama3_rope(8.0)),
        8_030_261_248, "meta-llama/Llama-3.1-8B"),
    "qwen2.5-0.5b": Preset(
        "Qwen2Config", _decoder(896, 4864, 24, 14, 2, 151936, 32768, 1e6, tied=True, eps=1e-6),
        494_032_768, "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": Preset(
        "Qwen2Config", _decoder(1536, 8960, 28, 12, 2, 151936, 131072, 1e6, tied=True, eps=1e-6),
        1_543_714_304, "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-7b": Preset(
        "Qwen2Config", _decoder(3584, 18944, 28, 28, 4, 152064, 131072, 1e6, tied=False, eps=1e-6),
        7_615_616_512, "Qwen/Qwen2.5-7B"),
    "qwen3-0.6b": Preset(
        "Qwen3Config",
        _decoder(1024, 3072, 28, 16, 8, 151936, 40960, 1e6, tied=True, eps=1e-6, head_dim=128),
        596_049_920, "Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Preset(
        "Qwen3Config",
        _decoder(2048, 6144, 28, 16, 8, 151936, 40960, 1e6, tied=True, eps=1e-6, head_dim=128),
        1_720_574_976, "Qwen/Qwen3-1.7B"),
    "qwen3-4b": Preset(
        "Qwen3Config",
        _decoder(2560, 9728, 36, 32, 8, 151936, 40960, 1e6, tied=True, eps=1e-6, head_dim=128),
        4_022_468_096, "Qwen/Qwen3-4B"),
    "qwen3-8b": Preset(
        "Qwen3Config",
        _decoder(4096, 12288, 36, 32, 8, 151936, 40960, 1e6, tied=False, eps=1e-6, head_dim=128),
        8_190_735_360, "Qwen/Qwen3-8B"),
    "mistral-7b": Preset(
        "MistralConfig",
        _decoder(4096, 14336, 32, 32, 8, 32768, 32768, 1e6, tied=False, sliding_window=None),
        7_248_023_552, "mistralai/Mistral-7B-v0.3"),
    "gemma-2-2b": Preset(
        "Gemma2Config",
        _decoder(2304, 9216, 26, 8, 4, 256000, 8192, 1e4, tied=True, eps=1e-6, head_dim=256,
                 query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
                 final_logit_softcapping=30.0),
        2_614_341_888, "google/gemma-2-2b", attention="eager"),
    "phi-3-mini": Preset(
        "Phi3Config",
        _decoder(3072, 8192, 32, 32, 32, 32064, 4096, 1e4, tied=False, sliding_window=2047,
                 original_max_position_embeddings=4096),
        3_821_079_552, "microsoft/Phi-3-mini-4k-instruct"),
    "gpt2": Preset("GPT2Config", _gpt2(768, 12, 12), 124_439_808, "openai-community/gpt2"),
    "gpt2-medium": Preset(
        "GPT2Config", _gpt2(1024, 24, 16), 354_823_168, "openai-community/gpt2-medium"),
    "gpt2-xl": Preset(
        "GPT2Config", _gpt2(1600, 48, 25), 1_557_611_200, "openai-community/gpt2-xl"),
}
# fmt: on

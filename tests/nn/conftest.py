"""Tiny models of every family: random weights, hidden 64, two layers, vocabulary 97."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = {
    "Llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "Mistral": {"head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    # The second layer has no rotary embedding.
    "SmolLM3": {"no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "Phi3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        }
    },
    # Caps so low that they matter for random weights.
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "Granite": {"logits_scaling": 0.25, "embedding_multiplier": 3.0},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "output_router_logits": True,
    },
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
MODELS = {"GPT2": "GPT2LMHeadModel"}


@pytest.fixture(params=sorted(OPTIONS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_model() -> Callable[..., transformers.PreTrainedModel]:
    def make(family: str, **options: object) -> transformers.PreTrainedModel:
        config_class = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
        config = config_class(**COMMON | OPTIONS[family] | options)
        torch.manual_seed(0)
        model = getattr(transformers, MODELS.get(family, f"{family}ForCausalLM"))(config)
        with torch.no_grad():  # norms start as ones, biases as zeros: give every weight a part
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.train()

    return make


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 97, (2, 12), generator=generator)
    labels = input_ids.clone()
    labels[0, :4] = -100
    return {"input_ids": input_ids, "labels": labels}

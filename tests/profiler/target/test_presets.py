import pytest
import torch
import transformers

from nearlight.profiler.target.presets import PRESETS


def test_the_promised_presets_are_there():
    wanted = (
        "smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b llama-3.2-1b llama-3.2-3b "
        "llama-3.1-8b qwen2.5-0.5b qwen2.5-7b qwen3-0.6b qwen3-1.7b qwen3-8b mistral-7b "
        "gemma-2-2b phi-3-mini gpt2"
    )
    assert set(wanted.split()) <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_the_published_one(name):
    preset = PRESETS[name]
    config = getattr(transformers, preset.config_class)(**preset.values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=preset.attention
        )
    assert sum(p.numel() for p in model.parameters()) == preset.num_parameters


def test_rope_and_tying_arrive_in_the_configuration():
    preset = PRESETS["llama-3.2-1b"]
    config = transformers.LlamaConfig(**preset.values)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["rope_theta"] == 500_000
    assert config.rope_parameters["factor"] == 32
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 131_072


def test_softcapped_attention_is_not_left_to_sdpa():
    capped = {name for name, p in PRESETS.items() if p.values.get("attn_logit_softcapping")}
    assert capped == {name for name, p in PRESETS.items() if p.attention == "eager"} != set()

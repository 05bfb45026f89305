from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearlight.nn import Llama, LlamaConfig
from nearlight.nn.llama import from_transformers_names

Make = Callable[..., Any]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "plain": {},
    "tied, wide heads": {"tie_word_embeddings": True, "head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_transformers(
    variant: str, make_model: Make, batch: Any
) -> None:
    theirs = make_model("Llama", **VARIANTS[variant])
    ours = Llama.from_transformers(theirs)
    expected = theirs(**batch)
    torch.testing.assert_close(ours(batch["input_ids"]), expected.logits)
    loss = ours(batch["input_ids"], batch["labels"])
    torch.testing.assert_close(loss, expected.loss)
    expected.loss.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        theirs_name = name if name == "lm_head.weight" else f"model.{name}"
        torch.testing.assert_close(parameter.grad, gradients[theirs_name], msg=name)


def test_weights_are_copies_and_names_map_both_ways(make_model: Make) -> None:
    theirs = make_model("Llama", tie_word_embeddings=True)
    ours = Llama.from_transformers(theirs.eval())
    assert not ours.training
    assert ours.lm_head.weight is ours.embed_tokens.weight
    assert set(from_transformers_names(theirs.state_dict())) == set(ours.state_dict())
    pointers = {p.data_ptr() for p in theirs.parameters()}
    assert not any(p.data_ptr() in pointers for p in ours.parameters())


def test_the_models_dtype_is_kept_and_positions_stay_exact(make_model: Make, batch: Any) -> None:
    theirs = make_model("Llama").to(torch.bfloat16)
    ours = Llama.from_transformers(theirs)
    assert ours.lm_head.weight.dtype == torch.bfloat16
    assert ours.rotary_emb.inv_freq.dtype == torch.float32
    assert ours(batch["input_ids"], batch["labels"]).dtype == torch.float32


def test_position_ids_shift_the_sequence(make_model: Make, batch: Any) -> None:
    theirs = make_model("Llama")
    ours = Llama.from_transformers(theirs)
    positions = torch.arange(7, 19).expand(2, -1)
    expected = theirs(input_ids=batch["input_ids"], position_ids=positions).logits
    torch.testing.assert_close(ours(batch["input_ids"], position_ids=positions), expected)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("Qwen2", {}, "model_type='qwen2'"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic'",
        ),
    ],
)
def test_another_model_is_refused(
    family: str, options: dict[str, Any], message: str, make_model: Make
) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_transformers(make_model(family, **options).config)


def test_a_config_with_a_scaling_is_a_key(make_model: Make) -> None:
    options = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    config = make_model("Llama", **options).config
    first, second = (LlamaConfig.from_transformers(config) for _ in range(2))
    assert first.rope_scaling is not None and {first: 1}[second] == 1

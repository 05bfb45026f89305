"""Patching Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose positions have three axes where images are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from nearlight import ops
from nearlight.nn import compare_models, is_patched, patch, unpatch

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
VISION = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "depth": 2}
VISIONS = {
    "Qwen2VL": VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "Qwen2_5_VL": VISION | {"out_hidden_size": 64, "intermediate_size": 48, "window_size": 16},
    "Qwen3VL": VISION
    | {
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}
TOWER = {"linear_cross_entropy": 1, "rope": 2, "swiglu": 2}
EXPECTED = {
    "Qwen2VL": TOWER | {"rms_norm": 5, "layer_norm": 5},
    "Qwen2_5_VL": TOWER | {"rms_norm": 10, "swiglu": 4},
    "Qwen3VL": TOWER | {"rms_norm": 9, "layer_norm": 6},
}
IMAGE, VIDEO, START, END = 90, 91, 92, 93


@pytest.fixture(params=EXPECTED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def make(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(
        text_config=dict(TEXT),
        vision_config=VISIONS[family],
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():  # norms start as ones, biases as zeros: give every weight a part
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two texts with an image of 4 × 4 patches, 2 × 2 tokens, in other places."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE, (2, 14), generator=generator)
    for row, start in enumerate((2, 6)):
        ids[row, start], ids[row, start + 5] = START, END
        ids[row, start + 1 : start + 5] = IMAGE
    labels = ids.masked_fill(ids >= IMAGE, -100)
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def test_every_part_gets_the_ops_that_exist(family: str) -> None:
    patched = patch(make(family))
    assert {row.op: 0 for row in patched.rows}.keys() == EXPECTED[family].keys()
    for op, count in EXPECTED[family].items():
        assert sum(row.count for row in patched.rows if row.op == op) == count, op
    assert patched.skipped == () and patched.reason == ""


@pytest.mark.parametrize("has_image", [True, False])
def test_loss_and_every_gradient_stay(family: str, has_image: bool, batch: Any) -> None:
    if not has_image:
        ids = batch["input_ids"].clamp(max=IMAGE - 1)
        batch = {"input_ids": ids, "labels": ids}
    plain, model = make(family), make(family)
    patch(model)
    with mock.patch.object(ops, "rope", wraps=ops.rope) as rope:
        comparison = compare_models(plain, model, batch)
    assert comparison.passed, comparison
    cos = rope.call_args.args[2]
    # With images elsewhere, the positions of two sequences differ.
    assert torch.equal(cos[0], cos[-1]) is not has_image
    if has_image:
        compared = {row.module for row in comparison.rows if row.quantity == "gradient"}
        assert compared == {name for name, p in plain.named_parameters() if p.requires_grad}


def test_real_logits_where_they_are_asked_for_and_the_same_tokens(family: str, batch: Any) -> None:
    plain, model = make(family).eval(), make(family).eval()
    patch(model)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    del batch["labels"]
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(2, 14).long()}
    assert torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))


def test_the_loss_is_fused_in_training_and_unpatch_undoes_it(family: str, batch: Any) -> None:
    model = make(family)
    expected = model(**batch)
    patch(model)
    fused = model(**batch)
    assert fused.logits.shape == (2, 14, 0)
    torch.testing.assert_close(fused.loss, expected.loss)
    unpatch(model)
    assert not any(is_patched(module) for module in model.modules())
    again = model(**batch)
    assert torch.equal(again.loss, expected.loss) and torch.equal(again.logits, expected.logits)

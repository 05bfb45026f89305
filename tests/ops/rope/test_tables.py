"""The tables that `rope` takes, against those of transformers' own rotary modules, bit by bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from nearlight.ops import packed_positions, rope, rope_tables
from nearlight.ops.rope.tables import rope_frequencies

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {**YARN, "factor": 4.0},
    "yarn as DeepSeek": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn as gpt-oss": {**YARN, "factor": 32.0, "beta_fast": 32.0, "truncate": False},
    "yarn with a factor of attention": {**YARN, "factor": 8.0, "attention_factor": 1.3},
    "yarn with one ramp": {**YARN, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 2.0},
    "yarn with a sharp edge": {**YARN, "factor": 8, "beta_fast": 1e9, "beta_slow": 1e8},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * pair for pair in range(64)],
        "long_factor": [1.0 + 0.7 * pair for pair in range(64)],
    },
}
MAX_POSITIONS = 16_384


def config_of(parameters: dict[str, Any], **options: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
        **options,
    )


def of(config: Any) -> dict[str, Any]:
    """What a config says of its tables."""
    return {**config.rope_parameters, "max_position_embeddings": config.max_position_embeddings}


# Within the trained context, at its edge, beyond it, far beyond it.
@pytest.mark.parametrize("last", [9, 4095, 4096, MAX_POSITIONS - 1, MAX_POSITIONS, 131_071])
@pytest.mark.parametrize("name", TYPES)
def test_tables_are_those_of_transformers(name: str, last: int) -> None:
    positions = torch.tensor([[0, 1, 2, 3, last // 2, last], [7, 5, 0, last, 1, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        config = config_of(TYPES[name])
        expected = LlamaRotaryEmbedding(config)(torch.ones(1, dtype=dtype), positions)
        found = rope_tables(128, positions, parameters=of(config), dtype=dtype)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == (2, 6, 128) and one.dtype == dtype
            assert torch.equal(one, other)


def test_every_type_of_transformers_that_scales_a_context_is_tried() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tried = {parameters["rope_type"] for parameters in TYPES.values()}
    assert tried - {"default"} == ROPE_INIT_FUNCTIONS.keys() - {"proportional"}


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_a_factor_that_is_left_out_is_that_of_the_two_contexts(name: str) -> None:
    parameters = {**TYPES[name], "factor": None}
    config = config_of(parameters)
    expected = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(9)[None])
    found = rope_tables(128, torch.arange(9)[None], parameters=of(config))
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match="needs max_position_embeddings: add it"):
        rope_tables(128, torch.arange(9), parameters=parameters)


def test_part_of_a_head_as_phi3() -> None:
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
        },
    )
    expected = Phi3RotaryEmbedding(config)(torch.ones(1), torch.arange(5)[None])
    found = rope_tables(32, torch.arange(5)[None], parameters=of(config))
    assert found[0].shape[-1] == 24 and all(map(torch.equal, found, expected))


QWENS = {
    "in blocks": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, {}),
    "in turns": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, {"mrope_interleaved": True}),
}


@pytest.mark.parametrize("sections", [[16, 24, 24], [24, 20, 20], [22, 21, 21], [64, 0, 0]])
@pytest.mark.parametrize("scaling", ["default", "yarn"])
@pytest.mark.parametrize("layout", QWENS)
def test_multimodal_sections_are_those_of_qwen(
    layout: str, scaling: str, sections: list[int]
) -> None:
    make_config, module, stated = QWENS[layout]
    config = make_config(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 1e6, **TYPES[scaling], "mrope_section": sections},
    )
    positions = torch.randint(0, 9000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = module(config)(torch.ones(1), positions)
    found = rope_tables(128, positions, parameters=of(config) | stated)
    assert found[0].shape == (2, 7, 128) and all(map(torch.equal, found, expected))
    # Text has the same position on all axes: the tables of a model without sections.
    text = positions[:1].expand(3, -1, -1)
    plain = rope_tables(128, text[0], parameters=of(config) | {"mrope_section": None})
    assert all(map(torch.equal, rope_tables(128, text, parameters=of(config) | stated), plain))


def test_tables_fit_what_rope_makes_of_them(assert_right: Any) -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 2, 5, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 9, 7, 1, 0]])
    for interleaved in (False, True):
        tables = rope_tables(8, positions, 100.0, interleaved=interleaved)
        turned, _ = rope(q, k, *tables, interleaved=interleaved, backend="triton")
        angles = positions[:, None, :, None].double() * 100.0 ** -(torch.arange(4).double() / 4)
        pairs = q.double().unflatten(-1, (4, 2) if interleaved else (2, 4))
        if not interleaved:
            pairs = pairs.transpose(-1, -2)
        truth = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles)
        )
        if not interleaved:
            truth = truth.transpose(-1, -2)
        torch.testing.assert_close(turned, truth.flatten(-2).float(), atol=1e-5, rtol=1e-5)
    cos, sin = rope_tables(8, positions)
    halves = rope(q, k, cos[..., :4], sin[..., :4], rotary_dim=8, backend="triton")
    assert all(map(torch.equal, halves, rope(q, k, cos, sin, backend="triton")))


def test_each_packed_sequence_turns_as_it_does_alone() -> None:
    lengths = [3, 1, 0, 4]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k = torch.randn(10, 2, 8), torch.randn(10, 1, 8)  # two tokens of padding
    positions = packed_positions(cu_seqlens, 10)
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0, 1]]
    long = rope_tables(8, torch.arange(50))
    packed = rope(q[None], k[None], *long, position_ids=positions, heads_dim=2, backend="triton")
    direct = rope(q[None], k[None], *rope_tables(8, positions), heads_dim=2, backend="triton")
    assert all(map(torch.equal, packed, direct))
    for start, end in pairwise(cu_seqlens.tolist()):
        short = rope_tables(8, torch.arange(end - start))
        alone = rope(q[None, start:end], k[None, start:end], *short, heads_dim=2, backend="triton")
        for one, other in zip(alone, packed, strict=True):
            assert torch.equal(one[0], other[0, start:end])


def test_positions_are_counted_under_compile_too() -> None:
    compiled = torch.compile(
        lambda cu, tokens: packed_positions(cu, tokens), backend="aot_eager", fullgraph=True
    )
    for cu_seqlens in (torch.tensor([0, 2, 5]), torch.tensor([0, 5]), torch.tensor([0, 0, 1])):
        assert torch.equal(compiled(cu_seqlens, 6), packed_positions(cu_seqlens, 6))


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
def test_tables_under_compile(name: str) -> None:
    torch._dynamo.reset()  # each name is another graph of the same line
    parameters = of(config_of(TYPES[name]))
    compiled = torch.compile(
        lambda positions: rope_tables(128, positions, parameters=parameters),
        backend="aot_eager",
        fullgraph=True,
    )
    for positions in (torch.tensor([[0, 5, 20_000]]), torch.tensor([[7, 4], [0, 9]])):
        expected = rope_tables(128, positions, parameters=parameters)
        assert all(map(torch.equal, compiled(positions), expected))


@pytest.mark.parametrize("is_in_turns", [False, True])
def test_sections_under_compile(is_in_turns: bool) -> None:
    parameters = {"mrope_section": [24, 20, 20], "mrope_interleaved": is_in_turns}
    compiled = torch.compile(rope_tables, backend="aot_eager", fullgraph=True)
    positions = torch.randint(0, 9000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = rope_tables(128, positions, parameters=parameters)
    assert all(map(torch.equal, compiled(128, positions, parameters=parameters), expected))


@pytest.mark.parametrize("name", TYPES)
def test_no_positions_no_table(name: str) -> None:
    parameters = of(config_of(TYPES[name]))
    for shape in ((0,), (2, 0)):
        empty = torch.zeros(shape, dtype=torch.int64)
        assert rope_tables(128, empty, parameters=parameters)[0].shape == (*shape, 128)


def test_tables_depend_on_nothing_around_them() -> None:
    positions = torch.tensor([[0, 100_000]])
    parameters = of(config_of(TYPES["dynamic"]))
    expected = rope_tables(128, positions, parameters=parameters)
    torch.set_default_dtype(torch.float64)
    try:
        found = rope_tables(128, positions, parameters=parameters)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        cast = rope_tables(128, positions, parameters=parameters)
    for one, two, three in zip(expected, found, cast, strict=True):
        assert two.dtype == three.dtype == torch.float32
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize(
    "message, options",
    [
        (r"rope_type='ntk': allowed are default, linear", {"parameters": {"rope_type": "ntk"}}),
        ("needs factor: add it", {"parameters": {"rope_type": "linear"}}),
        ("needs max_position_emb", {"parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("does not take alpha; allowed are rope_type", {"parameters": {"alpha": 1.0}}),
        ("does not take factor", {"parameters": {"factor": 4.0}}),
        ("without mrope_section: add", {"parameters": {"mrope_interleaved": True}}),
        (
            "base=100.0 and rope_theta=5.0: give one",
            {"parameters": {"rope_theta": 5.0}, "base": 100.0},
        ),
        ("give an even number", {"parameters": {"partial_rotary_factor": 0.4}}),
        ("add up to the 4 pairs", {"parameters": {"mrope_section": [1, 1, 1]}}),
        ("0 or more", {"parameters": {"mrope_section": [5, -1, 0]}}),
        (r"allowed is \(3, S\) or \(3, B, S\)", {"parameters": {"mrope_section": [2, 1, 1]}}),
        (
            "one for each of the 4 pairs",
            {"parameters": {**TYPES["longrope"], "long_factor": [1.0]}},
        ),
    ],
)
def test_what_does_not_fit_is_said(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        rope_tables(8, torch.arange(5), **options)


def test_refusals_of_tensors() -> None:
    with pytest.raises(TypeError, match="positions are torch.float32"):
        rope_tables(8, torch.arange(5.0))
    with pytest.raises(TypeError, match="dtype=torch.int64"):
        rope_tables(8, torch.arange(5), dtype=torch.int64)
    with pytest.raises(ValueError, match="four entries"):
        rope_tables(2, torch.arange(5), parameters=of(config_of(TYPES["dynamic"])))
    with pytest.raises(ValueError, match="use rope_tables"):
        rope_frequencies(128, 1e4, of(config_of(TYPES["longrope"])))
    with pytest.raises(TypeError, match="cu_seqlens is torch.float32"):
        packed_positions(torch.tensor([0.0, 1.0]), 3)
    for bad in ([[0, 1]], []):
        with pytest.raises(ValueError, match=r"allowed is \(sequences \+ 1,\)"):
            packed_positions(torch.tensor(bad, dtype=torch.int64), 3)
    for bad in ([1, 3], [0, 2, 1], [0, 4]):
        with pytest.raises(ValueError, match="starts that begin at 0"):
            packed_positions(torch.tensor(bad), 3)

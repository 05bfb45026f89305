from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nearlight.core import backend
from nearlight.core.numerics import judge
from nearlight.nn import RotaryEmbedding
from nearlight.ops import rope_tables


@pytest.mark.parametrize("forced", ["reference", "triton"])
def test_turns_each_pair_by_its_angle(forced: backend.Backend) -> None:
    rope = RotaryEmbedding(4, theta=100.0)
    q, k = torch.randn(1, 2, 3, 6), torch.randn(1, 1, 3, 6)
    with backend.force(forced):
        turned, _ = rope(q, k, torch.tensor([[0, 1, 5]]))
    pairs = torch.complex(q[..., :2].double(), q[..., 2:4].double())
    angles = torch.tensor([[0], [1], [5]]) * torch.tensor([1.0, 0.1], dtype=torch.float64)
    expected = pairs * torch.exp(1j * angles)
    truth = torch.cat([expected.real, expected.imag], dim=-1)
    # fp32 angles, cosines and products: what plain PyTorch makes of the same formula.
    wide = angles.float()
    plain = q[..., :4] * wide.cos().repeat(1, 2)
    plain += torch.cat([-q[..., 2:4], q[..., :2]], dim=-1) * wide.sin().repeat(1, 2)
    judgement = judge(turned[..., :4], plain, truth)
    assert judgement.passed, judgement.reason
    assert torch.equal(turned[..., 4:], q[..., 4:])
    assert rope.state_dict() == {}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    plain, scaled = (RotaryEmbedding(128, 500_000.0, s).inv_freq for s in (None, LLAMA3))
    waves = 2 * math.pi / plain
    assert torch.equal(scaled[waves < 2048], plain[waves < 2048])
    assert torch.equal(scaled[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 2048) & (waves < 8192)
    assert between.sum() > 3 and (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_those_of_the_op_whatever_the_models_dtype(
    scaling: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    rope = RotaryEmbedding(64, 1e6, scaling).to(dtype)
    positions = torch.tensor([[0, 1, 5000, 100_001]])
    expected = rope_tables(64, positions, 1e6, parameters=scaling, dtype=dtype)
    assert all(map(torch.equal, rope.tables(positions, dtype), expected))
    assert ("yarn" in repr(rope)) is (scaling is YARN)


def test_what_it_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="rotary_dim=5: channels turn in pairs"):
        RotaryEmbedding(5)
    with pytest.raises(ValueError, match=r"give RotaryEmbedding theta .*nearlight.ops.rope_tables"):
        RotaryEmbedding(4, 1e4, {"rope_theta": 1e4, "mrope_section": [1, 1]})
    with pytest.raises(ValueError, match="goes by the positions: use rope_tables"):
        dynamic = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 10}
        RotaryEmbedding(4, 1e4, dynamic)

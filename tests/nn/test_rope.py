from __future__ import annotations

import math

import pytest
import torch

from nearlight.core import backend
from nearlight.core.numerics import judge
from nearlight.nn import Llama3Scaling, RotaryEmbedding


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


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=8192)
    wave_lengths = torch.tensor([100.0, 2048.0, 8192.0, 100_000.0])
    scaled = 2 * math.pi / scaling.apply(2 * math.pi / wave_lengths)
    torch.testing.assert_close(scaled / wave_lengths, torch.tensor([1.0, 1.0, 8.0, 8.0]))
    middle = scaling.apply(torch.tensor([2 * math.pi / 4096.0]))  # 2 turns: a third kept
    torch.testing.assert_close(middle * 4096 / (2 * math.pi), torch.tensor([1 / 3 + 2 / 24]))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="rotary_dim=5"):
        RotaryEmbedding(5)

from __future__ import annotations

import pytest
import torch
from torch import nn

from nearlight.core import backend
from nearlight.nn import RMSNorm


@pytest.mark.parametrize("forced", ["reference", "triton"])
def test_is_torchs_and_takes_its_state(forced: backend.Backend) -> None:
    theirs = nn.RMSNorm(24, eps=1e-6)
    with torch.no_grad():
        theirs.weight.copy_(torch.linspace(-1, 2, 24))
    ours = RMSNorm(24)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 24)
    with backend.force(forced):
        torch.testing.assert_close(ours(x), theirs(x))


def test_starts_as_a_norm_alone_whatever_the_offset() -> None:
    x = torch.randn(4, 16)
    expected = RMSNorm(16, elementwise_affine=False)(x)
    torch.testing.assert_close(RMSNorm(16)(x), expected)
    gemma = RMSNorm(16, offset=1.0, casting="gemma")
    assert torch.equal(gemma.weight, torch.zeros(16))
    torch.testing.assert_close(gemma(x), expected)
    assert RMSNorm(16, elementwise_affine=False).state_dict() == {}

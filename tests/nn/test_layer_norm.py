from __future__ import annotations

import pytest
import torch
from torch import nn

from nearlight.core import backend
from nearlight.nn import LayerNorm


@pytest.mark.parametrize("forced", ["reference", "triton"])
@pytest.mark.parametrize("bias", [True, False])
def test_is_torchs_and_takes_its_state(bias: bool, forced: backend.Backend) -> None:
    theirs = nn.LayerNorm(24, bias=bias)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.linspace(-1, 2, 24))
    ours = LayerNorm(24, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 24) + 4
    with backend.force(forced):
        torch.testing.assert_close(ours(x), theirs(x))


def test_without_parameters() -> None:
    x = torch.randn(4, 16)
    ours = LayerNorm(16, elementwise_affine=False)
    assert ours.state_dict() == {}
    torch.testing.assert_close(ours(x), nn.functional.layer_norm(x, (16,)))

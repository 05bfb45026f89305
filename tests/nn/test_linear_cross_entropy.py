from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlight.core import backend
from nearlight.nn import LinearCrossEntropyLoss


@pytest.mark.parametrize("forced", ["reference", "triton"])
def test_is_a_linear_head_and_cross_entropy(forced: backend.Backend) -> None:
    head = nn.Linear(16, 33)
    loss = LinearCrossEntropyLoss(16, 33, bias=True, label_smoothing=0.1, softcap=2.0)
    loss.load_state_dict(head.state_dict())
    x, labels = torch.randn(7, 16), torch.randint(33, (7,))
    labels[2] = -100
    expected = F.cross_entropy(2 * torch.tanh(head(x) / 2), labels, label_smoothing=0.1)
    with backend.force(forced):
        torch.testing.assert_close(loss(x, labels), expected)


def test_reduction_and_number_of_items_reach_the_op() -> None:
    x, labels = torch.randn(7, 16), torch.randint(33, (7,))
    each = LinearCrossEntropyLoss(16, 33, reduction="none")
    assert each(x, labels).shape == (7,)
    total = LinearCrossEntropyLoss(16, 33, reduction="sum")
    total.weight = each.weight
    torch.testing.assert_close(total(x, labels, num_items=2), each(x, labels).sum() / 2)

from __future__ import annotations

import torch

from nearlight.core import backend
from nearlight.ops import linear_cross_entropy
from nearlight.ops.linear_cross_entropy import loop
from nearlight.ops.linear_cross_entropy.loop import row_weights


def test_row_weights_divide_by_what_counts():
    labels = torch.tensor([0, 1, -100, 1])
    ones = row_weights(labels, torch.float32, -100, None, None, None, "mean")
    torch.testing.assert_close(ones, torch.full((4,), 1 / 3))
    class_weight, token_weight = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0, torch.nan, 0.0])
    weights = row_weights(labels, torch.float32, -100, class_weight, token_weight, None, "mean")
    torch.testing.assert_close(weights[[0, 1, 3]], torch.tensor([2.0, 1.0, 0.0]) / 5)
    items = row_weights(labels, torch.float32, -100, None, None, torch.tensor(8), "sum")
    torch.testing.assert_close(items, torch.full((4,), 1 / 8))
    class_weight[0] = torch.nan  # of no row that counts
    weights = row_weights(labels[1:], torch.float32, -100, class_weight, None, None, "mean")
    torch.testing.assert_close(weights, torch.full((3,), 1 / 6))
    for labels in (torch.full((3,), -100), torch.empty(0, dtype=torch.int64)):
        weights = row_weights(labels, torch.float32, -100, None, None, None, "mean")
        assert (weights == 0).all()


def test_the_kernel_reads_no_memory_that_nothing_wrote(monkeypatch):
    # It reads whole vectors of 16 columns, of which the last may reach beyond the vocabulary.
    read = []

    def spy(logits, *args, **options):
        whole = -(-logits.shape[1] // 16) * 16
        read.append(logits.as_strided((logits.shape[0], whole), logits.stride()).clone())
        return loop_kernel(logits, *args, **options)

    loop_kernel = loop.cross_entropy_
    monkeypatch.setattr(loop, "cross_entropy_", spy)
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *shape: x.new_full((*shape,), torch.nan)
    )
    x, weight = torch.ones(3, 4), torch.ones(21, 4)
    with backend.force("triton"):
        linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.int64))
    assert [tuple(each.shape) for each in read] == [(3, 32)]
    assert all(each.isfinite().all() for each in read)

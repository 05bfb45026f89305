"""What holds of SiLU alone; what holds of every activation is in test_unary.py."""

import math

import torch

from nearlight.ops.silu import silu


def test_values_by_hand():
    x = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64, requires_grad=True)
    out = silu(x, backend="triton")
    share = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(out.tolist(), [0.0, 2 * share, -2 * (1 - share)])
    (dx,) = torch.autograd.grad(out.sum(), x)
    rest = share * (1 - share)
    torch.testing.assert_close(dx.tolist(), [0.5, share + 2 * rest, 1 - share - 2 * rest])

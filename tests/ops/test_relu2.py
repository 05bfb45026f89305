"""What holds of the squared ReLU alone; what holds of every activation is in test_unary.py."""

import torch

from nearlight.ops.relu2 import relu2


def test_values_by_hand():
    x = torch.tensor([-2.0, -0.0, 0.5, 3.0], requires_grad=True)
    out = relu2(x, backend="triton")
    assert out.tolist() == [0.0, 0.0, 0.25, 9.0]
    (dx,) = torch.autograd.grad(out, x, torch.tensor([5.0, 5.0, 5.0, -1.0]))
    assert dx.tolist() == [0.0, 0.0, 5.0, -6.0]

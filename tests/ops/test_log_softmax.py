"""What log_softmax shares with softmax is tested in test_softmax.py; here is what it alone has."""

import torch

from nearlight.ops import log_softmax


def test_far_from_the_maximum_no_digit_is_lost():
    # log(softmax(x)) would be −inf here.
    y = log_softmax(torch.tensor([[0.0, -200.0, 300.0]]), backend="triton")
    assert y.tolist() == [[-300.0, -500.0, 0.0]]


def test_what_is_masked_gets_no_gradient_whatever_comes_from_above():
    x = torch.zeros(1, 3, requires_grad=True)
    y = log_softmax(x, mask=torch.tensor([True, True, False]), backend="triton")
    y.backward(torch.tensor([[1.0, 0.0, 0.0]]))
    assert y.tolist()[0][2] == -torch.inf
    torch.testing.assert_close(x.grad, torch.tensor([[0.5, -0.5, 0.0]]))

"""What the tests of the losses share: a batch of tokens and a comparison with a formula in fp64."""

import pytest
import torch


@pytest.fixture
def tokens():
    """Log-probabilities of two policies, and a mask with one empty and one full row."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (-2.0 * torch.rand(4, 6, generator=generator) for _ in range(3))
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 1])[:, None]
    return new, old, ref, mask


@pytest.fixture
def assert_is():
    return _assert_is


def _assert_is(loss, formula, *leaves):
    """Hold a loss and its gradients in fp32 to a formula in fp64, both of the same leaves."""
    ours = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    value, expected = loss(*ours), formula(*truth)
    assert value.dtype == torch.float32 and value.shape == expected.shape
    torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=1e-6)
    upstream = torch.linspace(0.5, 2.0, value.numel()).view(value.shape)
    found = torch.autograd.grad(value, ours, upstream)
    for one, other in zip(
        found, torch.autograd.grad(expected, truth, upstream.double()), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=1e-6)

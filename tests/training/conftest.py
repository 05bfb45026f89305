"""What the tests of the optimizers share: parameters, gradients and some steps."""

import pytest
import torch


@pytest.fixture
def parameters():
    return _parameters


@pytest.fixture
def give_gradients():
    return _give_gradients


@pytest.fixture
def train():
    return _train


def _parameters(dtype=torch.float32, shapes=((5, 7), (3,), (0, 4), (1,), (64, 65))):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(values.to(dtype)) for values in made]


def _give_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = (scale * gradient).to(param.dtype)


def _train(optimizer, params, steps=5, first=0):
    for step in range(first, first + steps):
        _give_gradients(params, step)
        optimizer.step()

"""Muon against torch's own: values, state dicts, refusals."""

import copy

import pytest
import torch

from nearlight.training import Muon
from nearlight.training.muon import orthogonalized

MUON_SHAPES = ((16, 24), (16, 24), (24, 16), (8, 8))


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5}],
)
def test_muon_is_torchs_up_to_bf16(options, parameters, train):
    ours, theirs = parameters(shapes=MUON_SHAPES), parameters(shapes=MUON_SHAPES)
    start = [param.detach().clone() for param in ours]
    train(Muon(ours, lr=0.02, **options), ours, 3)
    train(torch.optim.Muon(theirs, lr=0.02, **options), theirs, 3)
    for one, two, old in zip(ours, theirs, start, strict=True):
        assert (one - two).norm() < 0.02 * (two - old).norm()


def test_muon_takes_a_learning_rate_on_the_device_and_torchs_state_dict(parameters, train):
    ours, theirs = parameters(shapes=MUON_SHAPES), parameters(shapes=MUON_SHAPES)
    trained = torch.optim.Muon(theirs, lr=0.02)
    train(trained, theirs, 2)
    optimizer = Muon(ours, lr=torch.tensor(0.5))
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    for one, two in zip(ours, theirs, strict=True):
        one.data.copy_(two)
        assert torch.equal(
            optimizer.state[one]["momentum_buffer"], trained.state[two]["momentum_buffer"]
        )
    start = [param.detach().clone() for param in ours]
    train(optimizer, ours, 1, first=2)
    train(trained, theirs, 1, first=2)
    for one, two, old in zip(ours, theirs, start, strict=True):
        assert (one - two).norm() < 0.02 * (two - old).norm()


def test_muon_refuses_vectors_and_wrong_options(parameters):
    with pytest.raises(ValueError, match="AdamW"):
        Muon(parameters())
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        Muon(parameters(shapes=MUON_SHAPES), adjust_lr_fn="other")


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (16, 16)])
def test_singular_values_come_near_one(shape):
    generator = torch.Generator().manual_seed(5)
    # Singular values from 0.1 to 1 of each matrix: below, five steps do not suffice.
    rank = min(shape)
    made = [torch.randn(shape, generator=generator) for _ in range(3)]
    parts = [torch.linalg.svd(x, full_matrices=False) for x in made]
    matrices = [u @ torch.diag(torch.linspace(0.1, 1, rank)) @ v for u, _, v in parts]
    found = orthogonalized(matrices)
    assert found.shape == (3, *shape) and found.dtype == torch.bfloat16
    for x, (u, _, v) in zip(found, parts, strict=True):
        values = torch.linalg.svdvals(x.float())
        assert 0.6 < values.min() and values.max() < 1.3
        # In the right directions: those of the matrix itself.
        assert torch.diag(u.T @ x.float() @ v.T).min() > 0.6


def test_a_zero_gradient_moves_nothing_but_the_decay(parameters):
    (weight,) = parameters(shapes=((4, 6),))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(weight.detach(), 0.95 * before)

import pytest
import torch

from nearlight.profiler.optimizers import OPTIMIZERS, make_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_changes_no_weight(name):
    weight = torch.nn.Parameter(torch.randn(8))
    before = weight.detach().clone()
    optimizer = make_optimizer(name, [weight])
    weight.grad = torch.ones(8)
    optimizer.step()
    assert torch.equal(weight, before)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown optimizer 'adam'.*adamw-fused"):
        make_optimizer("adam", [])

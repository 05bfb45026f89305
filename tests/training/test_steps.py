import pytest
import torch

from nearlight.training.steps import GroupwiseOptimizer


class Descent(GroupwiseOptimizer):
    """Plain descent that refuses vectors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    def check_group(self, group):
        if any(param.ndim == 1 for param in group["params"]):
            raise ValueError("a vector")

    def step_group(self, group):
        for param in group["params"]:
            param.sub_(param.grad, alpha=group["lr"])


def matrix():
    return torch.nn.Parameter(torch.ones(2, 2))


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = Descent([matrix()])
    with pytest.raises(ValueError, match="a vector"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


def test_every_group_steps_after_the_closure_whose_loss_returns():
    first, second = matrix(), matrix()
    optimizer = Descent([{"params": [first]}, {"params": [second], "lr": 0.25}])

    def closure():
        loss = first.sum() + second.sum()  # needs grad, though a step does not
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8
    assert first.tolist() == [[0.5, 0.5]] * 2 and second.tolist() == [[0.75, 0.75]] * 2
    assert optimizer.step() is None

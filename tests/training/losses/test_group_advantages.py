import pytest
import torch

from nearlight.training import group_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 2.5])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_is_its_formula(scale):
    groups = REWARDS.double().view(2, 3)
    expected = groups - groups.mean(1, keepdim=True)
    if scale != "none":
        deviation = groups.std(1, keepdim=True) if scale == "group" else groups.std()
        expected = expected / (deviation + 1e-4)
    found = group_advantages(REWARDS, 3, scale=scale)
    torch.testing.assert_close(found.double(), expected.flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_and_groups_of_one_have_no_advantage(scale):
    # torch.std of one number is NaN.
    assert (group_advantages(torch.full((4,), 0.7), 2, scale=scale).abs() < 1e-3).all()
    assert (group_advantages(torch.tensor([3.0]), 1, scale=scale) == 0).all()
    assert group_advantages(torch.zeros(0), 2, scale=scale).shape == (0,)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_reward_of_nan_spoils_its_own_group_alone(scale):
    rewards = REWARDS.clone()
    rewards[1] = torch.nan
    found = group_advantages(rewards, 3, scale=scale)
    assert found[:3].isnan().all()
    assert found[3:].equal(group_advantages(REWARDS, 3, scale=scale)[3:])


def test_what_is_not_allowed():
    with pytest.raises(ValueError, match="multiple of group_size"):
        group_advantages(REWARDS, 4)
    with pytest.raises(ValueError, match="group, batch, none"):
        group_advantages(REWARDS, 3, scale="std")

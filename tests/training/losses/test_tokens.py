import pytest
import torch

from nearlight.training.losses import tokens


def test_the_bounded_exponential_is_one_up_to_20_and_its_tangent_beyond():
    log_ratio = torch.tensor([-1e4, -50.0, -1.0, 0.0, 1e-4, 19.0, 25.0, 1e4], requires_grad=True)
    value = tokens.bounded_exp(log_ratio)
    (slope,) = torch.autograd.grad(value.sum(), log_ratio)
    inside = log_ratio <= 20
    torch.testing.assert_close(value[inside], log_ratio[inside].exp())
    torch.testing.assert_close(slope[inside], log_ratio[inside].exp())
    top = torch.tensor(20.0).exp()
    torch.testing.assert_close(value[~inside], top * (log_ratio[~inside] - 19))
    torch.testing.assert_close(slope[~inside], top.expand(2))
    less = tokens.bounded_expm1(log_ratio)
    torch.testing.assert_close(less[inside], log_ratio[inside].expm1())
    torch.testing.assert_close(less[~inside], value[~inside], rtol=1e-6, atol=1)
    (slope_less,) = torch.autograd.grad(less.sum(), log_ratio)
    torch.testing.assert_close(slope_less, slope)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_to_divide_by_is_0_with_a_live_graph(count):
    total = torch.zeros((), requires_grad=True)
    result = tokens.divided(total, count)
    assert result == 0
    assert torch.autograd.grad(result, total)[0] == 0


@pytest.mark.parametrize("count", [4, 4.0, torch.tensor(4)])
def test_divides(count):
    assert tokens.divided(torch.tensor(6.0), count) == 1.5


def test_what_is_outside_the_mask_reaches_neither_value_nor_gradient():
    values = torch.tensor([1.0, torch.nan, -torch.inf], requires_grad=True)
    kept = tokens.under(torch.tensor([1, 0, 0]), values.exp().log())
    assert kept.tolist() == [1.0, 0.0, 0.0]
    kept.sum().backward()
    assert values.grad[0] == 1


def test_half_precision_is_widened_first():
    assert tokens.wide(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert tokens.wide(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    "num_items, message",
    [(-1, "allowed is 0 and more"), (torch.ones(2), "0-d tensor")],
)
def test_bad_counts(num_items, message):
    with pytest.raises(ValueError, match=message):
        tokens.token_count("some_loss", torch.ones(2, dtype=torch.bool), num_items)


def test_a_mask_of_floats_is_refused():
    # Weights would be taken as "counts" without a word.
    with pytest.raises(TypeError, match=r"some_loss: mask is torch.float32.*mask > 0"):
        tokens.check_shapes("some_loss", torch.Size([2]), torch.tensor([0.5, 1.0]))

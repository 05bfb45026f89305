import pytest
import torch

from nearlight.training import ppo_loss


def others():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(4, 6, generator=generator) for _ in range(5)]


@pytest.mark.parametrize("has_values", [False, True])
def test_is_its_formula(tokens, assert_is, has_values):
    new, old, _, mask = tokens
    advantages, values, old_values, returns, entropy = others()
    given = {"old_values": old_values, "returns": returns} if has_values else {}

    def loss(x, values, entropy):
        total = ppo_loss(
            x,
            old,
            advantages,
            mask,
            epsilon_low=0.1,
            epsilon_high=0.3,
            value_epsilon=0.5,
            value_weight=0.4,
            entropy=entropy,
            entropy_weight=0.05,
            **given,
            **({"values": values} if has_values else {}),
        )
        return total if has_values else total + 0.0 * values.sum()

    def formula(x, values, entropy):
        a, old_v, r = (t.double() for t in (advantages, old_values, returns))
        ratio = (x - old.double()).exp()
        losses = torch.max(-ratio * a, -ratio.clamp(0.9, 1.3) * a) - 0.05 * entropy
        near = torch.max(torch.min(values, old_v + 0.5), old_v - 0.5)
        if has_values:
            losses = losses + 0.4 * 0.5 * torch.max((values - r) ** 2, (near - r) ** 2)
        total = (losses * mask).sum() / mask.sum()
        return total if has_values else total + 0.0 * values.sum()

    assert_is(loss, formula, new, values, entropy)


def test_micro_batches_add_up(tokens):
    new, old, _, mask = tokens
    advantages, *_ = others()
    parts = [
        ppo_loss(new[rows], old[rows], advantages[rows], mask[rows], num_items=mask.sum())
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], ppo_loss(new, old, advantages, mask))


@pytest.mark.parametrize("rows", [4, 0])
def test_nothing_to_count_is_0_with_a_live_graph(rows):
    new = torch.zeros(rows, 6, requires_grad=True)
    zeros = torch.zeros(rows, 6)
    loss = ppo_loss(
        new, zeros - 1, zeros + 1, zeros.bool(), values=zeros, old_values=zeros, returns=zeros
    )
    assert loss == 0
    loss.backward()
    assert (new.grad == 0).all()


def test_padding_may_hold_anything(tokens):
    new, old, _, mask = tokens
    advantages, values, old_values, returns, entropy = others()

    def run(value):
        x, v, h, *rest = (
            torch.where(mask, t, value)
            for t in (new, values, entropy, old, advantages, old_values, returns)
        )
        leaves = [t.requires_grad_() for t in (x, v, h)]
        loss = ppo_loss(
            x, rest[0], rest[1], mask, values=v, old_values=rest[2], returns=rest[3],
            entropy=h, entropy_weight=0.1,
        )  # fmt: skip
        return loss, *torch.autograd.grad(loss, leaves)

    clean = run(0.0)
    for value in (torch.nan, torch.inf, -torch.inf):
        assert all(one.equal(other) for one, other in zip(run(value), clean, strict=True))


@pytest.mark.parametrize("log_ratio", [-1e5, 95.0, 1e5])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("delta", [None, 3.0])
def test_far_ratios_have_finite_gradients(log_ratio, advantage, delta):
    new = torch.zeros(1, 2, requires_grad=True)
    old, mask = torch.full((1, 2), -log_ratio), torch.ones(1, 2).bool()
    loss = ppo_loss(new, old, torch.full((1, 2), advantage), mask, delta=delta)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.isfinite() and gradient.isfinite().all()
    if delta is not None:
        assert loss.abs() <= delta


@pytest.mark.parametrize(
    "options, message",
    [
        ({"values": torch.zeros(2, 3)}, "old_values, returns missing"),
        ({"value_epsilon": -0.1}, "value_epsilon=-0.1"),
        ({"entropy": torch.zeros(2, 3)}, r"entropy_weight=0.0 with"),
        ({"epsilon_high": -0.1}, "0 and more"),
        ({"advantages": torch.zeros(2)}, r"advantages is \(2,\)"),
    ],
)
def test_what_is_not_allowed(options, message):
    zeros = torch.zeros(2, 3)
    given = {"log_probs": zeros, "old_log_probs": zeros, "advantages": zeros}
    with pytest.raises(ValueError, match=message):
        ppo_loss(**{**given, "mask": zeros.bool(), **options})

import pytest
import torch

from nearlight.ops import linear_log_prob
from nearlight.training import grpo_loss

ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.0])
LOSS_TYPES = ["grpo", "bnpo", "dapo", "dr_grpo"]


def summed(losses, mask, loss_type):
    if loss_type == "grpo":
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return (losses * mask).sum() / (4 * 10 if loss_type == "dr_grpo" else mask.sum())


def formula(new, old, ref, mask, *, loss_type="dapo", level="token", beta=0.0, low=0.2, high=0.2):
    old, ref, advantages = old.double(), ref.double(), ADVANTAGES.double()[:, None]
    log_ratio = new - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None]
    ratio = log_ratio.exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    losses = losses + beta * ((ref - new).exp() - (ref - new) - 1)
    return summed(losses.expand(new.shape), mask, loss_type)


def constant_of(loss_type):
    return {"max_completion_length": 10} if loss_type == "dr_grpo" else {}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_is_its_formula(tokens, assert_is, loss_type, level, beta):
    # Liger 1082: without the ratio to the old policy the gradient is another one.
    new, old, ref, mask = tokens
    assert_is(
        lambda x: grpo_loss(
            x,
            ADVANTAGES,
            mask,
            old_log_probs=old,
            ref_log_probs=ref if beta else None,
            beta=beta,
            epsilon_high=0.28,
            importance_level=level,
            loss_type=loss_type,
            **constant_of(loss_type),
        ),
        lambda x: formula(
            x, old, ref, mask, loss_type=loss_type, level=level, beta=beta, high=0.28
        ),
        new,
    )


def test_the_clip_range_is_asymmetric(assert_is):
    log_ratios = torch.tensor([[0.1, 0.3, -0.1, -0.6, 3.0]])
    old, mask = torch.full((1, 5), -4.0), torch.ones(1, 5).bool()
    for sign in (1.0, -1.0):
        x = (old + log_ratios).requires_grad_()
        advantages = torch.full((1, 5), sign)
        loss = grpo_loss(
            x, advantages, mask, old_log_probs=old, epsilon_low=0.4, epsilon_high=0.2, delta=3.0
        )
        (gradient,) = torch.autograd.grad(loss, x)
        # Up to 1.2 a good token is raised, down to 0.6 a bad one is lowered, but not beyond 3.
        moves = [True, False, True, True, False] if sign > 0 else [True, True, True, False, False]
        assert (gradient[0] != 0).tolist() == moves


def test_without_old_log_probs_the_gradient_is_the_policy_gradient(tokens, assert_is):
    new, _, _, mask = tokens
    loss = grpo_loss(new.requires_grad_(), ADVANTAGES, mask)
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient, -ADVANTAGES[:, None] * mask / mask.sum())


def test_delta_bounds_what_a_bad_token_may_do(assert_is):
    old, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    new = torch.tensor([[1.0, 2.0]])  # ratios 2.7 and 7.4

    def truth(x):
        ratio = x.exp().clamp(max=4.0)
        return torch.max(ratio, ratio.clamp(0.8, 1.2)).mean()

    assert_is(
        lambda x: grpo_loss(x, -torch.ones(1), mask, old_log_probs=old, delta=4.0), truth, new
    )


def test_the_entropy_is_raised_with_a_gradient_of_its_own(tokens):
    # TRL 5595: an entropy computed without a graph moved the number and nothing else.
    new, _, _, mask = tokens
    entropy = torch.rand(4, 6).requires_grad_()
    loss = grpo_loss(new, ADVANTAGES, mask, entropy=entropy, entropy_weight=0.5)
    plain = grpo_loss(new, ADVANTAGES, mask)
    torch.testing.assert_close(plain - loss, 0.5 * (entropy * mask).sum() / mask.sum())
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.5 * mask / mask.sum())


@pytest.mark.parametrize("num_items", [10, 10.0, torch.tensor(10), torch.tensor(10.0)])
def test_micro_batches_add_up(tokens, num_items):
    # Liger 802: a mean of the micro-batches' means weighs their tokens differently.
    new, old, _, mask = tokens
    whole = grpo_loss(new, ADVANTAGES, mask, old_log_probs=old)
    parts = [
        grpo_loss(
            new[rows], ADVANTAGES[rows], mask[rows], old_log_probs=old[rows], num_items=num_items
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rows", [4, 0])
def test_nothing_to_count_is_0_with_a_live_graph(loss_type, level, rows):
    new = torch.zeros(rows, 6, requires_grad=True)
    mask = torch.zeros(rows, 6).bool()
    options = {"importance_level": level, "loss_type": loss_type, **constant_of(loss_type)}
    loss = grpo_loss(new, torch.ones(rows), mask, old_log_probs=new.detach() - 1, **options)
    assert loss == 0
    loss.backward()
    assert (new.grad == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_may_hold_anything(tokens, loss_type):
    # TRL 6166: an engine that cannot score a token answers NaN.
    new, old, ref, mask = tokens
    options = {"beta": 0.1, "entropy_weight": 0.1, "loss_type": loss_type, **constant_of(loss_type)}

    def run(change):
        x, *others = (change(t) for t in (new, old, ref, torch.ones(4, 6), ADVANTAGES_PER_TOKEN))
        x = x.requires_grad_()
        old_, ref_, entropy, advantages = others
        loss = grpo_loss(
            x,
            advantages,
            mask,
            old_log_probs=old_,
            ref_log_probs=ref_,
            entropy=entropy,
            **options,
        )
        return loss, *torch.autograd.grad(loss, x)

    ADVANTAGES_PER_TOKEN = ADVANTAGES[:, None].expand(4, 6)
    clean = run(lambda t: t.clone())
    for value in (torch.nan, torch.inf, -torch.inf):
        spoilt = run(lambda t, value=value: torch.where(mask, t, value))
        assert all(one.equal(other) for one, other in zip(spoilt, clean, strict=True))


@pytest.mark.parametrize("log_ratio", [-1e5, -60.0, 60.0, 95.0, 1e5])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_far_ratios_have_finite_gradients(log_ratio, advantage, level):
    # exp(95) is infinite in fp32: clipped away, it left 0 · inf = NaN in the gradient.
    new = torch.zeros(1, 2, requires_grad=True)
    loss = grpo_loss(
        new,
        torch.tensor([advantage]),
        torch.ones(1, 2).bool(),
        old_log_probs=torch.full((1, 2), -log_ratio),
        ref_log_probs=torch.full((1, 2), log_ratio),
        beta=0.1,
        importance_level=level,
    )
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.isfinite() and gradient.isfinite().all()
    if log_ratio > 0 and advantage < 0:  # a bad token that became likely is not let go
        assert (gradient != 0).all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "ppo"}, "grpo, bnpo, dapo, dr_grpo"),
        ({"importance_level": "batch"}, "token, sequence"),
        ({"loss_type": "dr_grpo"}, "the constant that 'dr_grpo' divides by"),
        ({"max_completion_length": 5}, "needed for it alone"),
        ({"loss_type": "dr_grpo", "max_completion_length": 0}, "allowed is 1 and more"),
        ({"loss_type": "grpo", "num_items": 5}, "divides 'dapo' alone"),
        ({"num_items": -5}, "allowed is 0 and more"),
        ({"beta": 0.1}, "without ref_log_probs"),
        ({"ref_log_probs": torch.zeros(2, 3)}, r"beta=0.0 with ref_log_probs"),
        ({"entropy_weight": 0.1}, "without entropy"),
        ({"epsilon_low": 1.2}, "0 to 1"),
        ({"delta": 1.1}, "more than 1"),
        ({"advantages": torch.zeros(3)}, r"advantages is \(3,\): it must be \(2, 3\)"),
        ({"log_probs": torch.zeros(6)}, r"allowed is \(B, S\)"),
        ({"old_log_probs": torch.zeros(2, 4)}, r"old_log_probs is \(2, 4\)"),
        (
            {"ref_log_probs": torch.zeros(2, 3), "beta": 0.1, "kl_estimator": "full"},
            "k1, k2, k3",
        ),
    ],
)
def test_what_is_not_allowed(options, message):
    given = {
        "log_probs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3).bool(),
    }
    with pytest.raises(ValueError, match=message):
        grpo_loss(**{**given, **options})


def test_from_hidden_states_to_the_heads_gradient(assert_is):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 6, 8, generator=generator)
    weight = torch.randn(11, 8, generator=generator)
    labels = torch.randint(11, (4, 6), generator=generator)
    labels[0, 2:] = labels[3] = -100
    old = -3.0 * torch.rand(4, 6, generator=generator)

    def loss(hidden, weight):
        log_probs, entropy = linear_log_prob(
            hidden, weight, labels, temperature=0.7, return_entropy=True, backend="triton"
        )
        return grpo_loss(
            log_probs,
            ADVANTAGES,
            labels != -100,
            old_log_probs=old,
            entropy=entropy,
            entropy_weight=0.05,
        )

    def truth(hidden, weight):
        log_p, mask = (hidden @ weight.t() / 0.7).log_softmax(-1), labels != -100
        new = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return formula(new, old, old, mask) - 0.05 * (entropy * mask).sum() / mask.sum()

    assert_is(loss, truth, hidden, weight)


def test_compiles_without_a_graph_break(tokens):
    new, old, _, mask = tokens
    compiled = torch.compile(grpo_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(new, ADVANTAGES, mask, old_log_probs=old),
        grpo_loss(new, ADVANTAGES, mask, old_log_probs=old),
    )

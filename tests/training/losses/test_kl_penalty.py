import pytest
import torch

from nearlight.training import kl_penalty

FORMULAS = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: d.exp() - 1 - d,
}


@pytest.mark.parametrize("estimator", [*FORMULAS])
def test_is_its_formula(tokens, assert_is, estimator):
    new, _, ref, _ = tokens
    assert_is(
        lambda x: kl_penalty(x, ref, estimator=estimator),
        lambda x: FORMULAS[estimator](ref.double() - x),
        new,
    )


def test_their_means_are_the_divergence_and_their_mean_gradients_what_is_said():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    p = log_p.exp().detach()  # how often each token is sampled
    divergence = (log_p.exp() * (log_p - ref)).sum()
    reverse = (ref.exp() * (ref - log_p)).sum()
    expected = {
        "k1": torch.zeros(5, dtype=torch.float64),
        "k2": torch.autograd.grad(divergence, logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(reverse, logits, retain_graph=True)[0],
    }
    for estimator, gradient in expected.items():
        mean = (p * kl_penalty(log_p, ref, estimator=estimator)).sum()
        if estimator != "k2":
            torch.testing.assert_close(mean, divergence)
        torch.testing.assert_close(
            torch.autograd.grad(mean, logits, retain_graph=True)[0], gradient
        )


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    # exp(d) − 1 − d in fp32 is 0 here, or 6e-8.
    d = torch.tensor([1e-3, -1e-3])
    k3 = kl_penalty(torch.zeros(2), d)
    torch.testing.assert_close(k3, 0.5 * d.square(), rtol=1e-2, atol=0)
    assert (k3 >= 0).all()


@pytest.mark.parametrize("estimator", [*FORMULAS])
@pytest.mark.parametrize("difference", [-1e5, -100.0, 100.0, 1e5])
def test_far_policies_have_finite_gradients_towards_each_other(estimator, difference):
    log_probs = torch.tensor([0.0], requires_grad=True)
    penalty = kl_penalty(log_probs, torch.tensor([difference]), estimator=estimator)
    (gradient,) = torch.autograd.grad(penalty, log_probs)
    assert penalty.isfinite() and gradient.isfinite()
    if estimator != "k1":
        assert gradient.sign() == -torch.tensor(difference).sign()


def test_another_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator="k4")

import pytest
import torch

from nearlight.training import orpo_loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sft_weight", [1.0, 0.0])
def test_is_its_formula(assert_is, reduction, sft_weight):
    chosen = -torch.tensor([0.01, 0.3, 0.6931, 0.7, 2.0, 30.0])

    def formula(chosen, rejected):
        odds = [x.exp() / (1 - x.exp()) for x in (chosen, rejected)]
        losses = -sft_weight * chosen - 0.2 * torch.sigmoid((odds[0] / odds[1]).log()).log()
        return losses if reduction == "none" else getattr(losses, reduction)()

    assert_is(
        lambda chosen, rejected: orpo_loss(
            chosen, rejected, beta=0.2, sft_weight=sft_weight, reduction=reduction
        ),
        formula,
        chosen,
        chosen.flip(0),
    )


@pytest.mark.parametrize("chosen", [0.0, -1e-30, -1e-9, -1e-6, -1.0, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e-9, -1e-6, -1.0, -1e4])
def test_sure_and_hopeless_completions_have_finite_gradients(chosen, rejected):
    # TRL 2564: log1p(−exp(0)) is −inf, and its gradient NaN.
    leaves = [torch.tensor([x], requires_grad=True) for x in (chosen, rejected)]
    loss = orpo_loss(*leaves)
    assert loss.isfinite()
    gradients = torch.autograd.grad(loss, leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0] <= -0.99  # the chosen one is learned in any case
    assert gradients[1] >= 0


def test_a_sure_completion_keeps_its_digits(assert_is):
    chosen = -torch.tensor([1e-5, 3e-4])

    def formula(chosen):
        log_odds = chosen - (-torch.expm1(chosen)).log()
        return 0.1 * (1 + (-log_odds).exp()).log().mean()

    far = torch.full((2,), -0.6931471805599453)  # odds of 1
    assert_is(lambda x: 1e5 * orpo_loss(x, far, sft_weight=0.0), lambda x: 1e5 * formula(x), chosen)


def test_no_pairs_are_0():
    assert orpo_loss(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    "options, message",
    [({"beta": -1.0}, "beta=-1.0"), ({"reduction": "avg"}, "mean, sum, none")],
)
def test_what_is_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        orpo_loss(torch.zeros(2), torch.zeros(2), **options)

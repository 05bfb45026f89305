import pytest
import torch

from nearlight.training import kto_loss

DESIRABLE = torch.tensor([True, False, True, False, False])


def batch():
    generator = torch.Generator().manual_seed(3)
    return [-30 * torch.rand(5, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ratios", [None, torch.tensor([1.0, 4.0]), torch.tensor([[-3.0]])])
def test_is_its_formula(assert_is, reduction, ratios):
    log_probs, reference = batch()

    def formula(log_probs):
        kl = 0.0 if ratios is None else ratios.double().mean().clamp(min=0)
        rewards = 0.2 * (log_probs - reference.double() - kl)
        good, bad = 1.5 * (1 - torch.sigmoid(rewards)), 0.5 * (1 - torch.sigmoid(-rewards))
        losses = torch.where(DESIRABLE, good, bad)
        return losses if reduction == "none" else getattr(losses, reduction)()

    assert_is(
        lambda log_probs: kto_loss(
            log_probs,
            reference,
            DESIRABLE,
            kl_log_ratios=ratios,
            beta=0.2,
            desirable_weight=1.5,
            undesirable_weight=0.5,
            reduction=reduction,
        ),
        formula,
        log_probs,
    )


@pytest.mark.parametrize("is_desirable", [torch.ones(5).bool(), torch.zeros(5).bool()])
def test_one_kind_alone_and_no_mismatched_pairs_will_do(is_desirable):
    # TRL 1380: the mean over none of them was NaN.
    log_probs, reference = batch()
    log_probs.requires_grad_()
    loss = kto_loss(log_probs, reference, is_desirable, kl_log_ratios=torch.zeros(0))
    torch.testing.assert_close(loss, kto_loss(log_probs, reference, is_desirable))
    loss.backward()
    assert log_probs.grad.isfinite().all()
    assert (log_probs.grad.sign() == (-1 if is_desirable[0] else 1)).all()


def test_the_estimate_gets_no_gradient():
    log_probs, reference = batch()
    ratios = torch.ones(3, requires_grad=True)
    loss = kto_loss(log_probs.requires_grad_(), reference, DESIRABLE, kl_log_ratios=ratios)
    assert torch.autograd.grad(loss, ratios, allow_unused=True) == (None,)


@pytest.mark.parametrize("ratio", [-1e5, 1e5])
def test_large_ratios_are_finite(ratio):
    log_probs = torch.full((2,), ratio, requires_grad=True)
    loss = kto_loss(log_probs, torch.zeros(2), torch.tensor([True, False]), reduction="none")
    loss.sum().backward()
    assert loss.tolist() == ([1.0, 0.0] if ratio < 0 else [0.0, 1.0])
    assert log_probs.grad.isfinite().all()


def test_what_is_not_allowed():
    zeros = torch.zeros(2)
    with pytest.raises(TypeError, match=r"is_desirable.bool\(\)"):
        kto_loss(zeros, zeros, torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="beta=0"):
        kto_loss(zeros, zeros, zeros.bool(), beta=0)
    with pytest.raises(ValueError, match=r"is_desirable is \(3,\)"):
        kto_loss(zeros, zeros, torch.zeros(3).bool())

import pytest
import torch

from nearlight.ops import linear_log_prob
from nearlight.training import dpo_loss, sequence_log_prob

FORMULAS = {
    "sigmoid": lambda m, b, e: (
        -((1 - e) * torch.sigmoid(b * m).log() + e * torch.sigmoid(-b * m).log())
    ),
    "robust": lambda m, b, e: (
        -((1 - e) * torch.sigmoid(b * m).log() - e * torch.sigmoid(-b * m).log()) / (1 - 2 * e)
    ),
    "hinge": lambda m, b, e: torch.clamp(1 - b * m, min=0),
    "ipo": lambda m, b, e: (m - 1 / (2 * b)) ** 2,
}


def pairs():
    generator = torch.Generator().manual_seed(1)
    return [-30 * torch.rand(5, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss_type, smoothing",
    [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0), ("ipo", 0.0)],
)
@pytest.mark.parametrize("has_reference", [True, False])
def test_is_its_formula(assert_is, loss_type, smoothing, has_reference, reduction):
    chosen, rejected, *reference = pairs()
    reference = reference if has_reference else [None, None]

    def formula(chosen, rejected):
        margin = chosen - rejected
        if has_reference:
            margin = margin - (reference[0].double() - reference[1].double())
        losses = FORMULAS[loss_type](margin, 0.3, smoothing)
        return losses if reduction == "none" else getattr(losses, reduction)()

    assert_is(
        lambda chosen, rejected: dpo_loss(
            chosen,
            rejected,
            *reference,
            beta=0.3,
            label_smoothing=smoothing,
            loss_type=loss_type,
            reduction=reduction,
        ),
        formula,
        chosen,
        rejected,
    )


@pytest.mark.parametrize("margin", [-1e5, 1e5])
@pytest.mark.parametrize("loss_type", [*FORMULAS])
def test_large_margins_have_finite_gradients(margin, loss_type):
    # Elsewhere log(sigmoid(·)): 0 · inf in the gradient.
    chosen = torch.tensor([margin], requires_grad=True)
    loss = dpo_loss(chosen, torch.zeros(1), beta=1.0, loss_type=loss_type)
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert loss.isfinite() and gradient.isfinite()
    if loss_type != "ipo" and margin < 0:
        assert gradient == -1


def test_a_wrong_label_is_as_likely_as_the_smoothing_says():
    chosen, rejected, *_ = pairs()
    right, wrong = dpo_loss(chosen, rejected), dpo_loss(rejected, chosen)
    smoothed = dpo_loss(chosen, rejected, label_smoothing=0.25)
    torch.testing.assert_close(smoothed, 0.75 * right + 0.25 * wrong)


def test_no_pairs_are_0_with_a_live_graph():
    chosen = torch.zeros(0, requires_grad=True)
    loss = dpo_loss(chosen, torch.zeros(0))
    assert loss == 0
    loss.backward()
    assert chosen.grad.shape == (0,)


def test_half_precision_is_subtracted_in_fp32():
    # In bf16 their difference of 996.98 would be 996.
    chosen, rejected = (torch.tensor([x]).bfloat16() for x in (-3.015625, -1000.0))
    torch.testing.assert_close(
        dpo_loss(chosen, rejected, loss_type="ipo", beta=1.0), torch.tensor(996.484375**2)
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "kto"}, "sigmoid, robust, hinge, ipo"),
        ({"beta": 0.0}, "beta=0.0: allowed are numbers above 0"),
        ({"label_smoothing": 0.5, "loss_type": "robust"}, "0 to below 0.5 with 'robust'"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "0 with the others"),
        ({"reduction": "avg"}, "mean, sum, none"),
        ({"ref_chosen_log_probs": torch.zeros(2)}, "pass both, or none"),
        ({"rejected_log_probs": torch.zeros(3)}, r"rejected_log_probs is \(3,\)"),
    ],
)
def test_what_is_not_allowed(options, message):
    given = {"chosen_log_probs": torch.zeros(2), "rejected_log_probs": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        dpo_loss(**{**given, **options})


def test_from_hidden_states_to_the_heads_gradient(assert_is):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, 5, 8, generator=generator)  # two chosen, then two rejected
    weight = torch.randn(11, 8, generator=generator)
    labels = torch.randint(11, (4, 5), generator=generator)
    labels[:, 3:] = -100
    labels[1] = -100  # nothing left of a completion

    def loss(hidden, weight):
        log_probs = linear_log_prob(hidden, weight, labels, backend="triton")
        return dpo_loss(*sequence_log_prob(log_probs, labels != -100).split(2))

    def formula(hidden, weight):
        log_probs = (hidden @ weight.t()).log_softmax(-1)
        kept = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        chosen, rejected = kept.sum(-1).split(2)
        return -torch.sigmoid(0.1 * (chosen - rejected)).log().mean()

    assert_is(loss, formula, hidden, weight)

from __future__ import annotations

import mpmath as mp
import pytest
import torch

from nearlight.core.numerics import judge
from nearlight.ops.linear_jsd import OP, linear_jsd
from nearlight.ops.linear_kl_div import linear_kl_div
from nearlight.ops.linear_kl_div.kernels import Options, divergence_
from nearlight.workbench.properties import values
from nearlight.workbench.trial import Trial


def make(rows=8, hidden=6, vocab=15, dtype=torch.float32, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": draw(rows, hidden).requires_grad_(),
        "weight": draw(vocab, hidden).requires_grad_(),
        "teacher_x": draw(rows, 2 * hidden),
        "teacher_weight": draw(vocab, 2 * hidden),
        **more,
    }


def masked(student, teacher):
    biases = torch.zeros(2, 15)
    biases[0, student], biases[1, teacher] = -torch.inf, -torch.inf
    return {"bias": biases[0].requires_grad_(), "teacher_bias": biases[1]}


CASES = [case for case in OP.check_cases if case.dtype != torch.float64]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {str(c.dtype)[6:]}")
def test_values_and_gradients(case):
    assert values.examine(OP, Trial(case), "cpu") == ""


def by_formula(given, beta, dtype):
    q, p = (
        (given[x].to(dtype) @ given[weight].to(dtype).t()).softmax(-1)
        for x, weight in (("x", "weight"), ("teacher_x", "teacher_weight"))
    )
    m = beta * p + (1 - beta) * q
    rows = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    return rows.mean()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_is_the_formula(beta):
    given = make()
    ours, plain, truth = (
        linear_jsd(**given, beta=beta, backend="triton"),
        by_formula(given, beta, torch.float32),
        by_formula(given, beta, torch.float64),
    )
    assert judge(ours, plain, truth).passed
    leaves = given["x"], given["weight"]
    for one, two, three in zip(
        *(torch.autograd.grad(loss, leaves) for loss in (ours, plain, truth)), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(two, three, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_its_ends_are_the_two_divergences(beta, backend):
    given = make()
    ours = linear_jsd(**given, beta=beta, backend=backend)
    assert ours.equal(linear_kl_div(**given, reverse=beta == 1.0, backend=backend))
    # Not its limits, which are 0.
    assert linear_jsd(**given, beta=abs(beta - 1e-6), backend=backend) < 1e-3 < ours


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("student, teacher", [([3], []), ([], [3]), ([0, 7], [7, 9]), ([2], [2])])
def test_is_finite_whatever_classes_are_at_minus_infinity(student, teacher, backend):
    given = make(**masked(student, teacher))
    loss = linear_jsd(**given, backend=backend)
    assert 0 < loss < 0.7  # log 2 bounds it
    leaves = given["x"], given["weight"], given["bias"]
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("distance", [90.0, 200.0])
def test_far_apart_it_is_log_2(distance):
    # The ratio p / q leaves the range of fp32.
    given = make(rows=1, vocab=2)
    with torch.no_grad():
        given["x"].fill_(1.0), given["weight"].zero_()
    given["teacher_weight"].zero_()
    given |= {"bias": torch.tensor([distance, 0.0]), "teacher_bias": torch.tensor([0.0, distance])}
    loss = linear_jsd(**given, backend="triton")
    torch.testing.assert_close(loss, torch.tensor(2.0).log())


def test_gradcheck_in_fp64():
    given = make(rows=4, vocab=7, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda x, w: linear_jsd(
            x, w, given["teacher_x"], given["teacher_weight"],
            beta=0.3, softcap=3.0, temperature=1.3, backend="triton",
        ),
        (given["x"], given["weight"]),
    )  # fmt: skip


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_beta_outside(beta):
    with pytest.raises(ValueError, match="allowed is 0 to 1"):
        linear_jsd(**make(), beta=beta)


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("gap", [5.0, 20.0, 40.0])
def test_a_sure_student_keeps_the_digits_of_its_gradient(gap, beta):
    # Held to 60 digits: where one class has all, autograd in fp64 itself cancels (92% off at 40).
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 1, 16, generator=generator, dtype=torch.float64)
    logits[0, 3] += gap

    def softmax(row):
        shares = [mp.exp(mp.mpf(float(value))) for value in row]
        return [share / sum(shares) for share in shares]

    with mp.workdps(60):
        q, p, share = softmax(logits[0]), softmax(teacher[0]), mp.mpf(beta)
        slopes = [
            mp.log(of_q / of_p)
            if beta == 1.0
            else (1 - share) * mp.log(of_q / (share * of_p + (1 - share) * of_q))
            for of_q, of_p in zip(q, p, strict=True)
        ]
        mean = sum(of_q * slope for of_q, slope in zip(q, slopes, strict=True))
        truth = [float(of_q * (slope - mean)) for of_q, slope in zip(q, slopes, strict=True)]
    one = torch.ones(1, dtype=torch.float64)
    labels = torch.zeros(1, dtype=torch.int64)
    divergence_(logits, teacher, labels, one, one.clone(), Options(beta))
    expected = torch.tensor([truth], dtype=torch.float64)
    torch.testing.assert_close(logits / expected.norm(), expected / expected.norm())

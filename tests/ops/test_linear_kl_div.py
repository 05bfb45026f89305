from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nearlight.ops.linear_jsd import OP as JSD
from nearlight.ops.linear_kl_div import OP, linear_kl_div, reference
from nearlight.workbench.properties import values
from nearlight.workbench.trial import Trial

FWD = torch.ops.nearlight.linear_divergence_fwd.default


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


def triton(given, **options):
    return linear_kl_div(**given, backend="triton", **options)


# In fp64 plain PyTorch would be the truth itself.
CASES = [case for case in OP.check_cases if case.dtype != torch.float64]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {str(c.dtype)[6:]}")
def test_values_and_gradients(case):
    assert values.examine(OP, Trial(case), "cpu") == ""


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("reverse", [False, True])
def test_is_torchs_divergence_at_a_temperature(reverse, backend):
    given = make(dtype=torch.float64)
    student = (given["x"] @ given["weight"].t() / 2.0).log_softmax(-1)
    teacher = (given["teacher_x"] @ given["teacher_weight"].t() / 2.0).log_softmax(-1)
    pair = (teacher, student) if reverse else (student, teacher)
    plain = F.kl_div(*pair, log_target=True, reduction="batchmean")
    ours = linear_kl_div(**given, reverse=reverse, temperature=2.0, backend=backend)
    torch.testing.assert_close(ours, plain)
    leaves = given["x"], given["weight"]
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves)
    )


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_what_each_reduction_divides_by(backend):
    given = make(labels=torch.tensor([0, -100, 1, 2, -100, 3, 4, 5]))
    rows = linear_kl_div(**given, reduction="none", backend=backend)
    assert (rows[[1, 4]] == 0).all()
    for reduction, divisor in (("sum", 1), ("mean", 6), ("batchmean", 8)):
        found = linear_kl_div(**given, reduction=reduction, backend=backend)
        torch.testing.assert_close(found, rows.sum() / divisor)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("rows", [4, 0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean", "none"])
def test_all_ignored_and_nothing_there_give_zeros_and_a_graph(rows, reduction, backend):
    given = make(rows=rows, labels=torch.full((rows,), -100))
    loss = linear_kl_div(**given, reduction=reduction, backend=backend)
    assert (loss == 0).all() and loss.requires_grad
    for gradient in torch.autograd.grad(loss.sum(), (given["x"], given["weight"])):
        assert (gradient == 0).all()


def masked(student, teacher):
    biases = torch.zeros(2, 15)
    biases[0, student], biases[1, teacher] = -torch.inf, -torch.inf
    return {"bias": biases[0].requires_grad_(), "teacher_bias": biases[1]}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    "student, teacher, reverse, is_finite",
    [
        ([0, 7], [0, 7], False, True),
        ([0, 7], [0, 7], True, True),
        ([], [3], False, True),  # the teacher lacks what the student has
        ([], [3], True, False),
        ([3], [], True, True),
        ([3], [], False, False),
    ],
)
def test_classes_at_minus_infinity(student, teacher, reverse, is_finite, backend):
    given = make(**masked(student, teacher))
    loss = linear_kl_div(**given, reverse=reverse, backend=backend)
    if not is_finite:
        assert loss == torch.inf
        return
    assert loss.isfinite() and loss > 0
    leaves = given["x"], given["weight"], given["bias"]
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_an_impossible_class_is_infinite_even_where_the_weight_underflows(backend):
    given = make(rows=1, **masked([3], []))
    given["teacher_weight"] = torch.zeros(15, 12)
    given["teacher_bias"][3] = -150.0  # exp(−150) is 0 in fp32
    assert linear_kl_div(**given, backend=backend) == torch.inf


@pytest.mark.parametrize("record", [OP, JSD], ids=lambda record: record.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_tiles", [1, 2, 3, 5])
def test_any_number_of_chunks_is_right(assert_right, record, dtype, num_tiles, monkeypatch):
    shapes, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: (shapes.append(a.shape), mm(a, b, **k))[1])
    given = make(rows=640, vocab=40, dtype=dtype)
    budget_bytes = num_tiles * 2 * 128 * 64 * dtype.itemsize
    if dtype == torch.bfloat16:
        budget_bytes += 40 * 6 * 5  # of the 24-bit sum
    loss = record.function(**given, memory_budget_bytes=budget_bytes, backend="triton")
    assert sum(shape[1] == 12 for shape in shapes) == -(-5 // num_tiles)
    if dtype == torch.bfloat16:
        assert_right(record, **given, memory_budget_bytes=budget_bytes)
        return
    leaves = given["x"], given["weight"]
    whole = record.function(**given, backend="triton")
    torch.testing.assert_close(loss, whole)
    for one, other in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(whole, leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_in_fp64(reverse, reduction):
    given = make(rows=4, vocab=7, dtype=torch.float64)
    labels = torch.tensor([0, -100, 0, 0])
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    options = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3, "teacher_softcap": 2.0}
    torch.autograd.gradcheck(
        lambda x, w, b: linear_kl_div(
            x, w, given["teacher_x"], given["teacher_weight"], labels, b,
            reverse=reverse, reduction=reduction, backend="triton", **options,
        ),
        (given["x"], given["weight"], bias),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck(dtype):
    given = [tensor.detach() for tensor in make(rows=5, dtype=dtype).values()]
    for tensor in given[:2]:
        tensor.requires_grad_()
    rest = (None, None, 0.5, -100, 1.3, 3.0, 0.7, None, 1.0, "mean", None, True, True, False)
    torch.library.opcheck(FWD, (*given, torch.zeros(5, dtype=torch.int64), *rest))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_products_only_for_the_gradients_needed(needs, monkeypatch):
    calls, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (calls.append(1), mm(*a, **k))[1])
    given = make()
    for name, is_needed in zip(("x", "weight"), needs, strict=True):
        given[name].requires_grad_(is_needed)
    triton(given).backward()
    assert len(calls) == 2 + sum(needs)


def test_nan_in_an_ignored_row_of_either_reaches_nobody():
    given = make(labels=torch.tensor([0, 0, -100, 0, 0, 0, 0, 0]))
    expected = torch.autograd.grad(triton(given), given["x"])[0]
    with torch.no_grad():
        given["x"][2] = given["teacher_x"][2] = torch.nan
    assert torch.autograd.grad(triton(given), given["x"])[0].equal(expected)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"temperature": 0.0}, ValueError, "temperature=0.0: allowed are numbers above 0"),
        ({"reduction": "max"}, ValueError, "mean, sum, none, batchmean"),
        ({"teacher_softcap": -1.0}, ValueError, "allowed are numbers above 0"),
        ({"teacher_x": torch.ones(8, 5)}, ValueError, r"teacher_x is \(8, 5\)"),
        ({"teacher_weight": torch.ones(14, 12)}, ValueError, r"teacher_weight is \(14, 12\)"),
        ({"teacher_bias": torch.ones(15).double()}, TypeError, "convert one"),
        ({"teacher_bias": torch.ones(15, requires_grad=True)}, ValueError, "detach it"),
    ],
)
def test_what_is_not_allowed(changes, error, message):
    with pytest.raises(error, match=message):
        linear_kl_div(**{**make(), **changes})


def test_a_second_derivative_raises_and_a_teacher_alike_gives_nothing():
    given = make()
    loss = triton(given)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(loss, given["x"], create_graph=True)
    given |= {"teacher_x": given["x"].detach(), "teacher_weight": given["weight"].detach()}
    assert triton(given) == 0 and reference(**given) == 0

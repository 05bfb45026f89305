"""What is timed is held to the rule of `check`: before the timing, and after it on new values."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.op import Case
from nearlight.workbench import trial, work
from nearlight.workbench.trial import Trial, make_inputs
from nearlight.workbench.work import Machine, Work, differs_after, differs_before, expected_of

MACHINE = Machine("cpu", find_gpu("h200"))
CASE = Case("6x40", {"rows": 6, "N": 40}, torch.float32)


def softmax(x, backend="auto"):
    return x.softmax(-1)


def test_the_truth_is_fp32_where_fp64_does_not_fit(plain_op):
    def reference(x):
        if x.dtype == torch.float64:
            raise torch.OutOfMemoryError("fp64")
        return 2 * x

    op = plain_op(reference)
    inputs = make_inputs(op, Trial(CASE), "cpu")
    expected, what = expected_of(op, inputs, Trial(CASE), is_backward=True)
    assert what == "float32 reference" and expected.truth.outputs[0].dtype == torch.float32
    assert set(expected.terms()) == {"x"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_case_is_held_to_what_the_check_holds_it_to(plain_op, dtype):
    op, seventh = plain_op(softmax), Trial(replace(CASE, dtype=dtype), seed=7)
    ours, _ = expected_of(op, make_inputs(op, seventh, "cpu"), seventh, is_backward=True)
    checks = trial.standard(op, seventh, "cpu")
    for one, two in ((ours.plain, checks.plain), (ours.truth, checks.truth)):
        assert torch.equal(one.outputs[0], two.outputs[0])
        assert torch.equal(one.gradients["x"], two.gradients["x"])
    assert torch.equal(ours.terms()["x"], checks.terms()["x"])


def test_of_a_forward_alone_no_gradient_is_asked(plain_op):
    op = plain_op(softmax)
    expected, _ = expected_of(op, make_inputs(op, Trial(CASE), "cpu"), Trial(CASE), False)
    assert not expected.truth.gradients and not expected.terms()


def test_a_truth_keeps_no_copy_of_the_inputs_alive(plain_op):
    kept = []

    def reference(x):
        kept.append(weakref.ref(x))
        return x.exp().sum()

    op = plain_op(reference)
    expected, _ = expected_of(op, make_inputs(op, Trial(CASE), "cpu"), Trial(CASE), True)
    assert expected.truth.gradients["x"].dtype == torch.float64
    gc.collect()
    alive = [x.dtype for ref in kept if (x := ref()) is not None]
    assert torch.float64 not in alive


def test_terms_that_cancel_excuse_what_they_excuse_in_the_check(plain_op, monkeypatch):
    """Under an upstream gradient that is constant along its rows a softmax has no gradient."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.softmax(-1)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            wide = y.double()
            return (wide * (g - (wide * g).sum(-1, keepdim=True))).float() * factor

    factor = 1.0
    op = plain_op(lambda x: Softmax.apply(x), softmax)
    monkeypatch.setattr(
        work, "make_upstream", lambda outputs, trial: [torch.ones_like(y) for y in outputs]
    )
    expected, _ = expected_of(op, make_inputs(op, Trial(CASE), "cpu"), Trial(CASE), True)
    given = (op, op.function, CASE, MACHINE, expected, True)
    # The same result without the terms breaks the rule: they are what excuses it.
    without = (op, op.function, CASE, MACHINE, replace(expected, terms=None), True)
    assert differs_before(*without, num_draws=0) and not differs_before(*given, num_draws=0)
    factor = 1e4
    assert differs_before(*given).startswith("gradient of x where its terms cancel: ")


def test_new_values_are_written_where_the_timed_ones_lie(plain_op):
    op = plain_op(lambda x: 2 * x)
    sets = [make_inputs(op, Trial(CASE, seed=seed), "cpu") for seed in range(work.NUM_SETS)]
    former = [inputs["x"].detach().clone() for inputs in sets]
    places = [inputs["x"].data_ptr() for inputs in sets]
    assert differs_after(op, Work(op.function, sets, None), CASE, MACHINE) == ""
    assert not torch.equal(sets[0]["x"], former[0]) and sets[0]["x"].data_ptr() == places[0]
    kept = [(2 * x).detach() for x in former]
    wrong = Work(lambda x: kept[places.index(x.data_ptr())], sets, None)
    assert differs_after(op, wrong, CASE, MACHINE).startswith("output: ")


def test_what_is_raised_after_the_timing_is_said(plain_op):
    """The sets are made; from then on the memory is too small, for the truth or for ours."""

    def double(x):
        if is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2 * x

    is_full = False
    for function, reference in ((lambda x: 2 * x, double), (double, lambda x: 2 * x)):
        is_full = False
        op = plain_op(function, reference)
        sets = [make_inputs(op, Trial(CASE, seed=seed), "cpu") for seed in range(work.NUM_SETS)]
        is_full = True
        found = differs_after(op, Work(op.function, sets, None), CASE, MACHINE)
        assert found == "raised OutOfMemoryError: CUDA out of memory"


def test_a_gradient_whose_terms_do_not_fit_is_held_to_the_rule_without_them(plain_op):
    num_calls = 0

    def reference(x):
        nonlocal num_calls
        num_calls += 1
        if num_calls > 3:  # outputs, truth and plain PyTorch fit
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2 * x

    op = plain_op(lambda x: 2 * x + 1e-3 * x.detach() - 1e-3 * x, reference)
    expected, _ = expected_of(op, make_inputs(op, Trial(CASE), "cpu"), Trial(CASE), True)
    found = differs_before(op, op.function, CASE, MACHINE, expected, True, num_draws=0)
    assert found.startswith("gradient of x: ") and num_calls == 4

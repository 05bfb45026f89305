from dataclasses import replace

import pytest
import torch

from nearlight.core import numerics


def test_the_three_measures_on_a_known_error():
    truth = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    actual = truth + torch.tensor([[0.0, 0.4], [0.0, 0.0]], dtype=torch.float64)
    found = numerics.errors(actual, truth)
    assert found.max_at_row_scale == pytest.approx(0.4 / 4)
    assert found.worst_row == pytest.approx(0.4 / 5)
    assert found.whole == pytest.approx(0.4 / 26**0.5)


def test_twice_plain_plus_two_ulp_is_the_border():
    truth = torch.ones(1, 4, dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    plain = truth + 4 * eps
    border = 2 * 4 * eps + 2 * eps
    inside, outside = truth + border * 0.999, truth + border * 1.001
    assert numerics.judge(inside, plain, truth, torch.bfloat16).passed
    assert not numerics.judge(outside, plain, truth, torch.bfloat16).passed


def test_plain_pytorch_in_bf16_passes_against_itself():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    truth = x.double().exp()
    plain = x.bfloat16().exp()
    assert numerics.judge(plain, plain, truth).passed


def test_one_wrong_element_in_a_large_tensor_is_found():
    truth = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).double()
    wrong = truth.float()
    wrong[300, 7] += 0.01
    verdict = numerics.judge(wrong, truth.float(), truth)
    assert not verdict.passed
    assert "largest error over its row's scale" in verdict.reason


def test_a_small_row_is_judged_at_its_own_scale():
    truth = torch.ones(2, 4, dtype=torch.float64)
    truth[1] *= 1e-3
    wrong = truth.float()
    wrong[1] *= 1.01  # 1e-5 of the tensor's scale, 1% of its row's
    assert not numerics.judge(wrong, truth.float(), truth).passed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_never_pass_where_the_truth_is_finite(bad):
    truth = torch.ones(2, 3, dtype=torch.float64)
    wrong = truth.float()
    wrong[0, 0] = bad
    assert not numerics.judge(wrong, truth.float(), truth).passed
    # ... not even where plain PyTorch fails the same way at another place.
    plain = truth.float()
    plain[1, 1] = bad
    assert not numerics.judge(wrong, plain, truth).passed


def test_nan_and_inf_where_the_truth_has_them_agree():
    truth = torch.tensor([[1.0, float("inf"), float("nan")]], dtype=torch.float64)
    assert numerics.judge(truth.float(), truth.float(), truth).passed
    assert not numerics.judge(truth.float().nan_to_num(), truth.float(), truth).passed


def test_empty_tensors_agree_and_shapes_must():
    empty = torch.ones(0, 4)
    assert numerics.judge(empty, empty, empty.double()).passed
    with pytest.raises(ValueError, match="shape"):
        numerics.errors(torch.ones(2), torch.ones(3))


def test_what_is_left_out_leaves_the_rows_as_they_are():
    truth = torch.ones(4, 64, dtype=torch.float64)
    truth[1] = 1e-8
    plain, ours = truth.float(), truth.float()
    ours[1] = 0
    assert not numerics.judge(ours, plain, truth).passed
    for tensor in (ours, plain, truth):
        tensor[0, 0] = float("nan")
    assert not numerics.judge(ours, plain, truth).passed
    assert numerics.judge(plain, plain, truth).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_of_zeros_far_below_the_largest_row_fails(dtype):
    truth = torch.ones(2, 64, dtype=torch.float64)
    truth[1] /= 8192
    wrong = truth.to(dtype)
    wrong[1] = 0
    verdict = numerics.judge(wrong, truth.to(dtype), truth)
    assert not verdict.passed and "error of the worst row 1 >" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_noise_in_a_row_that_cancels_excuses_no_other_row(dtype):
    truth = torch.ones(3, 64, dtype=torch.float64)
    truth[1] = 1e-9
    plain = truth.to(dtype)
    plain[1] = 2e-7  # what a sum in fp32 leaves of numbers near 1
    assert numerics.judge(plain, plain, truth).passed
    wrong = plain.clone()
    wrong[0, :8] *= 1.1
    verdict = numerics.judge(wrong, plain, truth)
    assert "its row's scale 0.1" in verdict.reason and "worst row 0.03" in verdict.reason


def test_a_row_that_cancels_is_judged_at_the_noise_of_fp32():
    truth = torch.ones(2, 64, dtype=torch.float64)
    truth[1] = 0
    plain, ours = truth.float(), truth.float()
    plain[1], ours[1] = 3e-8, 5e-8
    assert numerics.judge(ours, plain, truth).passed
    ours[1] = 1e-6
    assert not numerics.judge(ours, plain, truth).passed


@pytest.mark.parametrize("at", [1.0, 1.5, 1.984375])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_the_floor_is_two_units_in_the_last_place_wherever_the_number_lies(at, scale):
    eps = torch.finfo(torch.bfloat16).eps
    truth = torch.full((1, 8), at * scale, dtype=torch.float64)

    def passes(num_ulp):
        ours = truth.clone()
        ours[0, 3] -= num_ulp * eps * scale
        return numerics.judge(ours, truth, truth, torch.bfloat16).passed

    assert passes(1.99) and not passes(2.01)


def judged_at(share):
    """Return the judgement of a result that errs by this share of its limit."""
    eps = torch.finfo(torch.float32).eps
    truth = torch.ones(1, dtype=torch.float64)
    return numerics.judge(truth + share * 2 * eps, truth, truth, torch.float32)


class Draws:
    """Further draws of "a" that err by these shares; notes which were asked for."""

    def __init__(self, *shares):
        self.shares, self.asked = shares, []

    def __call__(self, index):
        self.asked.append(index)
        return {"a": judged_at(self.shares[(index - 1) % len(self.shares)])}


def test_only_what_breaks_the_rule_is_drawn_again_a_fixed_number_of_times():
    draws = Draws(0.5)
    first = {"a": judged_at(3.0), "b": judged_at(0.9)}
    found = numerics.redraw(first, draws)
    assert draws.asked == list(range(1, numerics.NUM_DRAWS + 1))
    assert found["a"].passed and found["a"].num_draws == numerics.NUM_DRAWS
    assert found["b"] is first["b"]
    unasked = Draws(9.0)
    assert numerics.redraw({"a": judged_at(0.9)}, unasked)["a"].passed and unasked.asked == []


def test_the_draw_that_raised_the_doubt_does_not_decide():
    assert numerics.redraw({"a": judged_at(90.0)}, Draws(0.5), 3)["a"].passed


def test_a_fault_far_beyond_the_limit_fails_at_once():
    draws = Draws(0.1)
    first = {"a": judged_at(1.5), "b": judged_at(2 * numerics.BEYOND_LUCK)}
    assert numerics.redraw(first, draws) == first and draws.asked == []
    assert not numerics.redraw({"a": numerics.failure("missing")}, draws)["a"].passed
    assert draws.asked == []


def test_rows_whose_terms_cancel_are_judged_alone_and_at_the_scale_of_these():
    terms = torch.tensor([[4.0, -8.0]] * 3 + [[float("inf"), 1.0]]).double()
    truth = torch.tensor([[1e-17, 0], [1e-17, 0], [3.0, 3.0], [0, 0]]).double()
    eps = torch.finfo(torch.float32).eps
    # The third row does not cancel, and of the fourth nothing is known.
    wrong = torch.tensor([[0.0, 0.0], [0.0, 0.0], [50.0, 9.0], [-50.0, 9.0]])

    def judged(error, plain=0.0, dtype=torch.float32):
        ours, theirs = wrong.clone(), truth.float()
        ours[0, 0], theirs[1] = error, plain
        mask, found = numerics.judge_cancelled(ours, theirs, truth, terms, dtype)
        assert mask.tolist() == [[True, True], [True, True], [False, False], [False, False]]
        assert found.num_excused == 4
        return found

    assert judged(15 * eps).passed and not judged(17 * eps).passed
    # Where plain PyTorch errs by a unit of the largest term, twice as much is allowed beside it ...
    assert judged(31 * eps, 8 * eps).passed and not judged(33 * eps, 8 * eps).passed
    # ... and no more where it is wrong.
    assert not judged(33 * eps, 5.0).passed and not judged(17 * eps, float("nan")).passed
    # A 16-bit result gets no more than fp32's: its sums are made there.
    assert judged(15 * eps, dtype=torch.bfloat16).passed
    assert not judged(17 * eps, dtype=torch.bfloat16).passed
    assert judged(float("nan")).share == judged(float("inf")).share == float("inf")
    zero, one = torch.tensor(0.0), torch.tensor(1.0).double()
    mask, found = numerics.judge_cancelled(zero + eps, zero, zero.double(), one, torch.float32)
    assert bool(mask) and found.passed


def test_where_no_terms_cancel_there_is_nothing_to_judge():
    one = torch.ones(2, 8).double()
    mask, found = numerics.judge_cancelled(5 * one, one, one, one, torch.float64)
    assert not mask.any() and found.passed and found.num_excused == 0


@pytest.mark.parametrize(("available", "taken"), [(0, 0), (1, 1), (2, 1), (7, 7), (8, 7)])
def test_an_odd_number_of_draws_is_taken(available, taken):
    draws = Draws(0.5)
    found = numerics.redraw({"a": judged_at(2.0)}, draws, available)["a"]
    assert len(draws.asked) == found.num_draws == taken and found.passed == (taken > 0)


def test_most_draws_or_their_whole_beyond_the_limit_fail():
    assert not numerics.redraw({"a": judged_at(2.0)}, Draws(1.2, 1.1, 0.1), 3)["a"].passed
    # The median is fine; the three draws as one tensor are not.
    found = numerics.redraw({"a": judged_at(2.0)}, Draws(0.1, 0.1, 3.0), 3)["a"]
    assert found.reason.startswith("error of the whole ")


def test_a_draw_without_a_faint_row_does_not_speak_for_one():
    def judged(draw):
        truth = torch.ones(2, 8, dtype=torch.float64)
        truth[1] = 1e-4 if draw % 3 == 0 else 1
        ours = truth.to(torch.bfloat16)
        ours[1] *= 0.5 if draw % 3 == 0 else 1
        return {"a": numerics.judge(ours, truth.to(torch.bfloat16), truth)}

    found = numerics.redraw(judged(0), judged)["a"]
    assert found.num_draws and found.reason.startswith("among faint rows, largest error over its")


def test_nan_or_nothing_in_a_further_draw_fails():
    good = judged_at(0.5)
    broken = replace(good, ours=replace(good.ours, whole=float("nan")), passed=False, reason="NaN")
    found = numerics.redraw({"a": judged_at(2.0)}, lambda index: {"a": broken})["a"]
    assert not found.passed and found.reason == "NaN"
    assert not numerics.redraw({"a": judged_at(2.0)}, lambda index: {})["a"].passed


def scalar(generator):
    return 1 + torch.rand((), dtype=torch.float64, generator=generator)


def cancelled(ours, plain):
    truth = torch.zeros(ours.shape).double()
    terms = truth + 1
    return numerics.judge_cancelled(ours, plain, truth, terms, ours.dtype)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_plain_pytorch_has_wrong_excuses_no_other_row(dtype):
    ours, plain = torch.zeros(2, 2, 8, dtype=dtype)
    plain[0], ours[1] = 5.0, 9.0
    assert not cancelled(ours, plain).passed


def test_where_terms_cancel_one_bad_row_of_plain_excuses_no_half_of_them():
    """In bf16 plain PyTorch leaves 1% of its rounding in each row, and in one row all of it."""
    generator = torch.Generator().manual_seed(3)
    eps = torch.finfo(torch.bfloat16).eps
    plain = 0.01 * eps * torch.randn(64, 8, generator=generator).sign()
    ours = 0.5 * eps * torch.ones(64, 8)
    ours[32:] = 0.02 * eps
    plain[7] = eps
    found = cancelled(ours.bfloat16(), plain.bfloat16())
    assert found.reason.startswith("error of the whole ")


@pytest.mark.parametrize(("num_rows", "least"), [(64, 0.95), (1, 0.6)])
def test_noise_of_cancelled_terms_passes_and_thrice_that_of_plain_is_caught(num_rows, least):
    """A row's rounding of its sum is the same in all of its entries: the worst case."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.finfo(torch.bfloat16).eps / 64

    def judged(factor):
        ours, plain = noise * torch.randn(2, num_rows, 1, generator=generator)
        ours, plain = ((x.bfloat16()).expand(num_rows, 8) for x in (factor * ours, plain))
        return {"a": cancelled(ours, plain)}

    def passed(factor):
        return numerics.redraw(judged(factor), lambda _: judged(factor))["a"].passed

    assert sum(passed(1.0) for _ in range(400)) >= 0.99 * 400
    assert sum(not passed(3.0) for _ in range(60)) >= least * 60


@pytest.mark.parametrize("factor", [4.0, 6.0])
def test_a_fault_that_all_cancelled_rows_have_is_no_noise(factor):
    """Each within what plain PyTorch's worst row errs, all of them together not."""
    plain = torch.randn(256, 1, generator=torch.Generator().manual_seed(0)) * 2.0**-12
    ours = torch.full((256, 8), factor * float(plain.abs().median()))
    assert ours[0, 0] < 2 * plain.abs().max()
    found = cancelled(ours.bfloat16(), plain.bfloat16().expand(256, 8))
    assert found.reason.startswith("error of the whole ")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tenth_of_the_terms_does_not_cancel_in_fp8(dtype):
    terms, truth = torch.ones(4, 8).double(), torch.full((4, 8), 0.1).double()
    given = torch.zeros(4, 8), truth.float(), truth, terms
    assert not numerics.judge_cancelled(*given, dtype)[0].any()


def cancelling_scalar(generator):
    return torch.randn((), dtype=torch.float64, generator=generator)


def narrow_rows(generator):
    return torch.randn(64, 1, dtype=torch.float64, generator=generator)


def rows_that_cancel(generator):
    truth = torch.randn(32, 16, dtype=torch.float64, generator=generator)
    return truth * 10 ** (-3 * torch.rand(32, 1, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("make", [scalar, cancelling_scalar, narrow_rows, rows_that_cancel])
def test_sound_results_pass_and_thrice_the_error_of_plain_is_caught(make):
    """Roundings as normal noise, no floor to speak of: the case in which luck is worst."""
    generator = torch.Generator().manual_seed(5)

    def judged(factor):
        truth = make(generator)
        ours, plain = (
            1e-5 * torch.randn(truth.shape, dtype=torch.float64, generator=generator)
            for _ in range(2)
        )
        return {"a": numerics.judge(truth + factor * ours, truth + plain, truth)}

    num_sound, num_faults = 400, 60
    passed = sum(
        numerics.redraw(judged(1.0), lambda _: judged(1.0))["a"].passed for _ in range(num_sound)
    )
    assert passed >= 0.99 * num_sound
    caught = sum(
        not numerics.together([judged(3.0)["a"] for _ in range(numerics.NUM_DRAWS)]).passed
        for _ in range(num_faults)
    )
    assert caught >= 0.95 * num_faults
    # One draw of a scalar raises the doubt in 63 of 100 trials; a check takes dozens.
    doubted = sum(any(not judged(3.0)["a"].passed for _ in range(6)) for _ in range(num_faults))
    assert doubted >= 0.95 * num_faults


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1.0, 1e200, 1.7e308])
def test_numbers_near_the_end_of_fp64_are_judged_like_others(scale):
    truth = torch.tensor([[1.0, 1e-200], [0.5, 0.25]], dtype=torch.float64) * scale
    assert numerics.judge(truth * (1 + 2.3e-16), truth, truth).passed
    assert not numerics.judge(truth * (1 + 1e-3), truth, truth).passed
    found = numerics.judge(truth * (1 + 1e-3), truth, truth)
    assert found.ours.whole == pytest.approx(1e-3, rel=1e-2)
    assert found.ours.worst_row == pytest.approx(1e-3, rel=1e-2)


def test_draws_near_the_end_of_fp64_are_taken_together():
    truth = torch.full((2, 4), 1.7e308, dtype=torch.float64)
    right, wrong = truth * (1 - 2.3e-16), truth * 0.9
    assert numerics.together([numerics.judge(right, right, truth)] * 3).passed
    assert not numerics.together([numerics.judge(wrong, right, truth)] * 3).passed


@pytest.mark.parametrize("smallest", [5e-324, 7.8e-309, 3e-308])
def test_what_is_too_small_for_a_dtype_may_be_zero_in_it(smallest):
    # The entropy of a confident row: fp64 has it, fp32 does not.
    truth, zero = torch.full((3, 4), smallest, dtype=torch.float64), torch.zeros(3, 4)
    found = numerics.judge(zero, zero, truth)
    assert found.passed, found.reason
    assert not numerics.judge(torch.full((3, 4), 1e-30), zero, truth).passed

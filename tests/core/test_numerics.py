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


def test_rows_whose_terms_cancel_are_right_to_the_last_place_of_these():
    terms = torch.tensor([[4.0, -8.0]] * 3 + [[1.0, 1.0], [float("inf"), 1.0]]).double()
    truth = torch.tensor([[1e-17, 0], [1e-17, 0], [3.0, 3.0], [0, 0], [0, 0]]).double()
    eps = torch.finfo(torch.float32).eps
    actual = torch.tensor([[15 * eps, 0], [17 * eps, 0], [3, 3], [0, float("nan")], [-50.0, 9.0]])

    def passed(actual, plain):
        return numerics.cancelled(actual, plain, truth, terms).all(1).tolist()

    # The second is beyond two units, the third does not cancel, the others are no numbers.
    assert passed(actual, truth.float()) == [True, False, False, False, False]
    # Where plain PyTorch errs by a unit, twice as much is allowed beside, in that row ...
    plain = truth.float() + torch.tensor([[0.0, 0.0], [8 * eps, 0.0]] + [[0.0, 0.0]] * 3)
    assert passed(actual, plain) == [True, True, False, False, False]
    # ... and in the others where it errs so in most.
    plain = truth.float() + torch.tensor([[8 * eps, 0.0], [0.0, 0.0]] + [[0.0, 0.0]] * 3)
    assert passed(actual, plain) == [True, False, False, False, False]
    plain[3] = eps
    assert passed(actual, plain) == [True, True, False, False, False]
    # A 16-bit result gets no more than fp32's: its sums are made there.
    assert passed(actual.bfloat16(), truth.bfloat16())[:2] == [True, False]
    zero, one = torch.tensor(0.0), torch.tensor(1.0).double()
    assert bool(numerics.cancelled(zero + eps, zero, zero.double(), one))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_plain_pytorch_has_wrong_excuses_no_other_row(dtype):
    terms, truth = torch.ones(2, 8).double(), torch.zeros(2, 8).double()
    plain, ours = torch.zeros(2, 2, 8, dtype=dtype)
    plain[0], ours[1] = 5.0, 9.0
    assert numerics.cancelled(ours, plain, truth, terms).all(1).tolist() == [True, False]


def test_where_terms_cancel_one_bad_row_of_plain_widens_no_other():
    """In bf16 plain PyTorch leaves 1% of its rounding in each row, and in one row all of it."""
    generator = torch.Generator().manual_seed(3)
    eps = torch.finfo(torch.bfloat16).eps
    terms, truth = torch.ones(64, 8).double(), torch.zeros(64, 8).double()
    plain = 0.01 * eps * torch.randn(64, 8, generator=generator).sign()
    ours = 0.5 * eps * torch.ones(64, 8)
    ours[32:] = 0.02 * eps
    plain[7] = eps
    wanted = [row in (7, *range(32, 64)) for row in range(64)]
    found = numerics.cancelled(ours.bfloat16(), plain.bfloat16(), truth, terms)
    assert found.all(1).tolist() == wanted


def test_rows_that_cancel_as_well_as_plain_pytorchs_pass():
    """Normal noise, no floor to speak of, rows independent of each other: the worst case."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.finfo(torch.bfloat16).eps / 8
    terms, truth = torch.ones(200, 8).double(), torch.zeros(200, 8).double()
    passed = []
    for _ in range(100):
        ours, plain = (
            (noise * torch.randn(200, 1, generator=generator)).bfloat16().expand(200, 8)
            for _ in range(2)
        )
        passed.append(bool(numerics.cancelled(ours, plain, truth, terms).all()))
    assert sum(passed) >= 99


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tenth_of_the_terms_does_not_cancel_in_fp8(dtype):
    terms, truth = torch.ones(4, 8).double(), torch.full((4, 8), 0.1).double()
    assert not numerics.cancelled(torch.zeros(4, 8).to(dtype), truth.to(dtype), truth, terms).any()


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

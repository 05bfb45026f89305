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
    assert "max_at_row_scale" in verdict.reason


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

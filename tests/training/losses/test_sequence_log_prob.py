import pytest
import torch

from nearlight.training import sequence_log_prob


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_sums_or_averages_what_the_mask_keeps(tokens, assert_is, average, kind):
    new, _, _, mask = tokens

    def formula(log_probs):
        total = (log_probs * mask).sum(-1)
        return total / mask.sum(-1).clamp(min=1) if average else total

    assert_is(lambda x: sequence_log_prob(x, mask.to(kind), average=average), formula, new)


def test_padding_may_be_minus_infinity_and_a_row_without_tokens_is_0():
    # open-instruct 1625: 0 / 0; and −inf · 0 = NaN where the mask was multiplied.
    log_probs = torch.tensor([[-1.0, -torch.inf], [-torch.inf, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    result = sequence_log_prob(log_probs, mask, average=True)
    assert result.tolist() == [-1.0, 0.0]
    result.sum().backward()
    assert log_probs.grad.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_half_precision_is_summed_in_fp32():
    log_probs = torch.full((1, 4096), -0.1, dtype=torch.bfloat16)
    result = sequence_log_prob(log_probs, torch.ones_like(log_probs).bool())
    torch.testing.assert_close(result, log_probs.float().sum(-1))
    assert result.dtype == torch.float32


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"mask is \(3,\): it must be \(2, 3\)"):
        sequence_log_prob(torch.ones(2, 3), torch.ones(3, dtype=torch.bool))

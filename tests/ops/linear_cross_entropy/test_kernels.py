from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from nearlight.core.numerics import judge
from nearlight.ops.linear_cross_entropy.kernels import LossOptions, cross_entropy_, scale_


def rows(count: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator)
    labels = torch.randint(vocab, (count,), generator=generator)
    return logits, labels, torch.ones(count)


def loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What torch answers."""
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss.detach(), *torch.autograd.grad(loss.sum(), logits)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33, 16_384, 16_385])
def test_loss_and_gradient_take_the_logits_place_and_nothing_around(vocab: int):
    logits, labels, ones = rows(5, vocab)
    guarded = torch.full((7, vocab + 5), torch.nan)
    inside = guarded[1:6, 3 : 3 + vocab].copy_(logits)
    loss = cross_entropy_(inside, labels, ones, LossOptions())
    for actual, plain, truth in zip(
        (loss, inside),
        loss_and_gradient(logits, labels),
        loss_and_gradient(logits.double(), labels),
        strict=True,
    ):
        judgement = judge(actual, plain, truth)
        assert judgement.passed, judgement.reason
    guarded[1:6, 3 : 3 + vocab] = torch.nan
    assert guarded.isnan().all()


def test_padding_may_hold_anything():
    logits, labels, ones = rows(4, 21)
    padded = torch.full((4, 64), torch.nan)
    padded[:, :21] = logits
    loss = cross_entropy_(padded[:, :21], labels, ones, LossOptions(), has_padding=True)
    expected = logits.clone()
    assert torch.equal(loss, cross_entropy_(expected, labels, ones, LossOptions()))
    assert torch.equal(padded[:, :21], expected)
    assert padded[:, 32:].isnan().all()


def test_without_a_gradient_the_logits_stay():
    logits, labels, ones = rows(4, 21)
    before = logits.clone()
    cross_entropy_(logits, labels, ones, LossOptions(), write_gradient=False)
    assert logits.equal(before)


@pytest.mark.parametrize("finite", [0, 50_000, 99_999])
def test_blocks_of_minus_infinity_before_the_only_finite_column(finite: int):
    logits = torch.full((1, 100_000), -torch.inf)
    logits[0, finite] = 3.0
    loss = cross_entropy_(logits, torch.tensor([finite]), torch.ones(1), LossOptions())
    assert loss.item() == 0.0
    assert (logits == 0).all()


def test_a_target_at_minus_infinity_costs_infinitely_and_has_a_finite_gradient():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0]])
    loss = cross_entropy_(logits, torch.tensor([0]), torch.ones(1), LossOptions())
    assert loss.item() == torch.inf
    torch.testing.assert_close(logits, torch.tensor([[-1.0, 0.5, 0.5]]))


def test_minus_infinity_in_the_first_block_and_the_target():
    logits = torch.full((1, 40_000), -torch.inf)
    logits[0, 39_999] = 3.0
    loss = cross_entropy_(logits, torch.tensor([0]), torch.ones(1), LossOptions())
    assert loss.item() == torch.inf
    assert logits[0, [0, 1, 39_999]].tolist() == [-1.0, 0.0, 1.0]


def test_a_sure_row_keeps_its_digits_under_an_offset():
    # p(label) = 1 − 3e−6: a loss from log(sum) alone would be left with one digit.
    logits = torch.zeros(1, 4) + 100.0
    logits[0, 1] += 14.0
    truths = loss_and_gradient(logits.double(), torch.tensor([1]))
    loss = cross_entropy_(logits, torch.tensor([1]), torch.ones(1), LossOptions())
    for actual, truth in zip((loss, logits), truths, strict=True):
        # Held to the truth rounded once, for torch in fp32 has lost its digits itself.
        for one, other in zip(actual.flatten(), truth.flatten(), strict=True):
            judgement = judge(one, other.float(), other)
            assert judgement.passed, judgement.reason


def test_nan_is_told_and_kept_out_of_ignored_rows():
    logits, labels, ones = rows(3, 8)
    logits[0, 2] = torch.nan
    logits[1, 2] = torch.nan
    labels[1] = -100
    loss = cross_entropy_(logits, labels, ones, LossOptions(softcap=5.0, z_loss=0.1))
    assert loss.isnan().tolist() == [True, False, False]
    assert loss[1] == 0
    assert (logits[1] == 0).all()


def test_large_softcapped_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -1e30, 0.0, torch.inf]])
    loss = cross_entropy_(logits, torch.tensor([1]), torch.ones(1), LossOptions(softcap=2.0))
    bounded = torch.tensor([[2.0, -2.0, 0.0, 2.0]])
    torch.testing.assert_close(loss, F.cross_entropy(bounded, torch.tensor([1]), reduction="none"))
    assert logits[0, [0, 1, 3]].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scale(dtype: torch.dtype):
    tensor = torch.randn(3, 70_000, dtype=dtype)
    factor = torch.tensor(0.3, dtype=torch.float64)
    scaled = tensor.clone()
    scale_(scaled, factor)
    judgement = judge(scaled, tensor * factor, tensor.double() * factor)
    assert judgement.passed, judgement.reason
    scale_(tensor, torch.tensor(1.0))
    assert not tensor.equal(scaled)


PAST_2_31 = """
import torch
from nearlight.ops.linear_cross_entropy.kernels import LossOptions, cross_entropy_
memory = torch.empty(2**32 + 8, dtype=torch.bfloat16)  # 8 GiB that are never touched
logits = memory.as_strided((3, 8), (2**31, 1))
logits.copy_(torch.arange(24).view(3, 8) / 8)
expected = logits.clone()
labels, ones = torch.tensor([1, 2, 3]), torch.ones(3)
loss = cross_entropy_(logits, labels, ones, LossOptions())
assert loss.equal(cross_entropy_(expected, labels, ones, LossOptions()))
assert logits.equal(expected)
"""


def test_rows_past_2_31_elements():
    # In a process of its own: 32-bit offsets would crash it.
    subprocess.run([sys.executable, "-c", PAST_2_31], check=True, timeout=120)

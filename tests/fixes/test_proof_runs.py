import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlight.core.numerics import NUM_DRAWS, judge
from nearlight.fixes.proof_runs import by_draws, judged, one_sequence, repeatable, worst_first


def test_dropout_is_off_in_training_mode_however_it_is_written():
    x = torch.ones(2, 4, 8, 8)
    with repeatable("cpu"):
        assert torch.equal(nn.Dropout(0.9)(x), x)
        assert torch.equal(nn.Dropout2d(0.9)(x), x)
        assert torch.equal(F.dropout(x, 0.9, True), x)
        assert torch.equal(torch.dropout(x, 0.9, True), x)
        plain = F.scaled_dot_product_attention(x, x, x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, dropout_p=0.9), plain)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.9), plain)
    assert not torch.equal(nn.Dropout(0.9)(x), x)


def test_random_numbers_repeat_and_the_callers_state_stays():
    before = torch.get_rng_state()
    with repeatable("cpu"):
        first = torch.rand(3)
    with repeatable("cpu"):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_dimension_of_the_sequence_is_cut():
    ids = torch.arange(3 * 100).view(3, 100)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones(3, 1, 100, 100),
        "position_ids": torch.arange(100),
        "num_items_in_batch": torch.tensor(300),
        "pixels": torch.ones(3, 5, 7),
    }
    one = one_sequence(batch, 32)
    assert torch.equal(one["input_ids"], ids[:1, :32])
    assert one["attention_mask"].shape == (1, 1, 32, 32)
    assert torch.equal(one["position_ids"], torch.arange(32))
    assert one["num_items_in_batch"] == 300
    assert one["pixels"].shape == (1, 5, 7)


def test_a_short_sequence_is_kept_whole():
    ids = torch.arange(10).view(2, 5)
    one = one_sequence({"input_ids": ids, "labels": ids}, 32)
    assert torch.equal(one["input_ids"], ids[:1]) and torch.equal(one["labels"], ids[:1])


def test_the_window_holds_labels():
    labels = torch.full((3, 100), -100)
    labels[1, 60:80] = 7
    ids = torch.arange(300).view(3, 100)
    one = one_sequence({"input_ids": ids, "labels": labels}, 16)
    # The first token of a window has no target of its own.
    assert (one["labels"][:, 1:] != -100).sum() == 15
    assert torch.equal(one["input_ids"], ids[1:2, 59:75])


def test_a_cache_is_cut_along_its_own_dimensions():
    past = torch.randn(4, 2, 3, 2, 100, 16)
    one = one_sequence({"input_ids": torch.ones(3, 1, dtype=torch.long), "past": past}, 32)
    assert torch.equal(one["past"], past[:, :, :1, :, :32])
    assert one["input_ids"].shape == (1, 1)


def test_a_batch_without_tokens_keeps_its_size():
    one = one_sequence({"pixel_values": torch.ones(4, 3, 224, 224)}, 32)
    assert one["pixel_values"].shape == (1, 3, 224, 224)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_what_one_run_lacks_fails(lacking):
    runs = [{"loss": torch.ones(2, dtype=torch.float64)} for _ in range(3)]
    runs[lacking] = {}
    (row,) = by_draws(lambda draw: judged(*runs), 8)
    words = ("patched", "plain", "fp64")[lacking]
    assert not row["passed"] and row["reason"] == f"not computed by the {words} run"


def test_shapes_that_differ_fail():
    found = judged({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"a": torch.ones(3)})
    assert not found["a"].passed and "patched" in found["a"].reason


def test_rows_tell_how_near_the_limit_they_are():
    truth = torch.ones(1, 4, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    plain = truth.float() + 8 * eps
    found = judged({"a": truth.float() + 9 * eps}, {"a": plain}, {"a": truth})
    (row,) = by_draws(lambda draw: found, 1)
    assert row["passed"] and row["of_allowed"] == pytest.approx(9 / (2 * 8 + 2))
    assert row["error"] == pytest.approx(9 * eps) and row["plain_error"] == pytest.approx(8 * eps)


def test_failed_rows_come_first():
    rows = [
        {"name": "near", "passed": True, "of_allowed": 0.9},
        {"name": "far", "passed": True, "of_allowed": 0.1},
        {"name": "over", "passed": False, "of_allowed": 1.1},
        {"name": "none", "passed": False},
    ]
    assert [row["name"] for row in worst_first(rows)] == ["none", "over", "near", "far"]


def shares(*of_allowed):
    """Return an attempt whose "a" errs by these shares of its limit, draw by draw."""
    asked = []
    eps = torch.finfo(torch.float32).eps
    truth = torch.ones(1, dtype=torch.float64)

    def at(share):
        return judge(truth + share * 2 * eps, truth, truth, torch.float32)

    def attempt(draw):
        asked.append(draw)
        return {"a": at(of_allowed[draw]), "b": at(0.1)}

    attempt.asked = asked
    return attempt


def test_bad_luck_in_one_draw_is_no_fault():
    attempt = shares(3.0, 0.5, 0.4, 0.6)
    a, b = by_draws(attempt, 4)
    assert a["passed"] and a["draws"] == 3 and attempt.asked == [0, 1, 2, 3]
    assert a["of_allowed"] == pytest.approx((0.77 / 3) ** 0.5)  # all three as one tensor
    assert b["passed"] and "draws" not in b


def test_a_row_that_fails_in_most_draws_fails():
    a, _ = by_draws(shares(3.0, 0.5, 1.1, 1.2), 4)
    assert not a["passed"] and a["of_allowed"] == pytest.approx(1.1)


def test_a_row_that_passes_is_asked_once_and_stays():
    attempt = shares(0.9, 9.0)
    assert by_draws(attempt, 8)[0]["passed"] and attempt.asked == [0]


def test_of_many_inputs_a_fixed_number_is_taken():
    attempt = shares(*[2.0] * 100)
    assert by_draws(attempt, 100)[0]["draws"] == NUM_DRAWS
    assert attempt.asked == list(range(1 + NUM_DRAWS))
    alone = shares(2.0)
    assert not by_draws(alone, 1)[0]["passed"] and alone.asked == [0]


def test_other_draws_take_other_samples():
    ids = torch.arange(40).view(4, 10)
    drawn = [one_sequence({"input_ids": ids, "labels": ids}, 5, draw) for draw in range(5)]
    assert [int(one["input_ids"][0, 0]) for one in drawn] == [0, 10, 20, 30, 0]
    pixels = torch.arange(3.0).view(3, 1)
    assert one_sequence({"pixel_values": pixels}, 5, 4)["pixel_values"].tolist() == [[1.0]]

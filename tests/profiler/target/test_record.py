from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.profiler.target.record import Sizes, sizes, task_loss


class Answer(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


def test_tokens_are_counted_by_input_ids():
    ids = torch.zeros(3, 5, dtype=torch.int64)
    assert sizes({"mask": torch.zeros(9), "input_ids": ids}) == Sizes(3, 15)
    assert sizes({"pixels": torch.zeros(4, 3, 8, 8)}) == Sizes(4, None)
    assert sizes({"x": torch.tensor(1.0)}) == Sizes(1, None)


@pytest.mark.parametrize(
    "output",
    [torch.tensor(2.5), SimpleNamespace(loss=torch.tensor(2.5)), {"loss": torch.tensor(2.5)}],
)
def test_loss_is_found_in_the_output(output):
    batch = {"x": torch.zeros(1)}
    assert task_loss("train", None, "t")(Answer(output), batch).item() == 2.5


def test_the_users_loss_function_comes_first():
    loss_fn = task_loss("train", lambda model, batch: batch["x"].sum() * 3, "t")
    assert loss_fn(Answer(torch.tensor(2.5)), {"x": torch.ones(2)}).item() == 6


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (torch.zeros(2, 3), r"shape \(2, 3\)"),
        (SimpleNamespace(loss=None), "NoneType"),
        ({"logits": torch.zeros(2)}, "NoneType"),
        ("words", "NoneType"),
    ],
)
def test_an_output_without_a_loss_is_bad_input(output, complaint):
    with pytest.raises(BadInput, match=complaint + r".*put labels into the batch"):
        task_loss("train", None, "t")(Answer(output), {"x": torch.zeros(1)})


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (None, t), lambda t: {"a": 1, "b": t}])
def test_other_tasks_answer_with_the_first_tensor(wrap):
    logits = torch.zeros(2, 3)
    assert task_loss("prefill", None, "t")(Answer(wrap(logits)), {"x": logits}) is logits


@pytest.mark.parametrize("output", [None, "words", {"a": 1}, (1, 2)])
def test_no_tensor_at_all_is_bad_input(output):
    with pytest.raises(BadInput, match="without a tensor"):
        task_loss("prefill", None, "t")(Answer(output), {"x": torch.zeros(1)})

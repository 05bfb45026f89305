from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu
from nearlight.profiler.target import from_model
from nearlight.profiler.target.record import (
    Sizes,
    check_gpu,
    check_model,
    check_task,
    sizes,
    task_loss,
)

LOSS = torch.tensor(2.5, requires_grad=True)


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
    [LOSS, SimpleNamespace(loss=LOSS), {"loss": LOSS}, (LOSS, torch.zeros(2, 3)), (LOSS[None],)],
)
def test_loss_is_found_in_the_output(output):
    batch = {"x": torch.zeros(1)}
    assert task_loss("train", None, "t")(Answer(output), batch).item() == 2.5


def test_the_users_loss_function_comes_first():
    loss_fn = task_loss("train", lambda model, batch: batch["x"].sum() * 3, "t")
    assert loss_fn(Answer(LOSS), {"x": torch.ones(2, requires_grad=True)}).item() == 6


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (torch.zeros(2, 3), r"shape \(2, 3\)"),
        (SimpleNamespace(loss=None), "NoneType"),
        ({"logits": torch.zeros(2)}, "NoneType"),
        ("words", "NoneType"),
        ((torch.zeros(2, 3), LOSS), "tuple"),
        ((), "NoneType"),
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


def test_a_loss_without_a_way_to_the_parameters_is_bad_input():
    detached = task_loss("train", lambda model, batch: model(**batch).detach(), "t")
    with pytest.raises(BadInput, match=r"t: no gradient flows from the loss .*\.detach\(\)"):
        detached(Answer(LOSS), {"x": torch.zeros(1)})
    with torch.no_grad():  # a forward pass alone may be looked at
        assert detached(Answer(LOSS), {"x": torch.zeros(1)}).item() == 2.5


def test_training_needs_gradients_switched_on():
    with pytest.raises(BadInput, match="task 'fly': allowed are train, prefill, decode"):
        check_task("fly")
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            check_task("prefill")
            with pytest.raises(BadInput, match="call it outside, or take task prefill"):
                check_task("train")
            with pytest.raises(BadInput, match="switched off here"):
                from_model(nn.Linear(2, 1), torch.ones(1, 2))


def test_models_with_nothing_to_train():
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(BadInput, match="t: all parameters are frozen.* unfreeze some"):
        check_model(frozen, "train", "t")
    with pytest.raises(BadInput, match="t: the model has no parameters, so"):
        check_model(nn.ReLU(), "train", "t")
    check_model(frozen, "prefill", "t")
    frozen.bias.requires_grad_()
    check_model(frozen, "train", "t")


def test_lazy_modules_have_to_run_first():
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    with pytest.raises(BadInput, match=r"t: 1\.weight belongs to a lazy module"):
        check_model(model, "prefill", "t")
    model(torch.ones(1, 2))
    check_model(model, "train", "t")


def test_a_gpu_without_the_dtype():
    target = SimpleNamespace(dtype="bf16")
    with pytest.raises(BadInput, match=r"^t4 has no bf16: take --dtype fp16 or --dtype fp32, or"):
        check_gpu(target, find_gpu("t4"))
    check_gpu(target, find_gpu("h200"))
    check_gpu(SimpleNamespace(dtype="fp16"), find_gpu("t4"))
    check_gpu(SimpleNamespace(dtype=""), find_gpu("t4"))

import pytest
import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.profiler.target import PRESETS, from_model, load


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("llama-3.2-1", r"unknown target 'llama-3\.2-1': did you mean llama-3\.2-1b or"),
        ("smolm2", r"did you mean smollm2-"),
        ("xyzzy", r"unknown target 'xyzzy': It is a preset \(smollm2-135m, "),
        ("", r"unknown target ''"),
        ("no/such/folder", r"no/such/folder: there is no such folder"),
        ("meta-llama/Llama-3.1-8B", r"did you mean the preset llama-3\.1-8b\? "),
        ("train.py", r"train\.py:function"),
    ],
)
def test_unknown_targets_are_one_line_with_the_nearest(target, complaint):
    with pytest.raises(BadInput, match=complaint) as caught:
        load(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", True])
@pytest.mark.parametrize("name", ["batch", "seq"])
def test_a_size_must_be_a_whole_number(name, size):
    with pytest.raises(BadInput, match=rf"{name} .*whole number of at least 1"):
        load("gpt2", **{name: size})


def test_task_and_dtype_are_checked():
    with pytest.raises(BadInput, match=r"task 'sleep': allowed are train, prefill, decode"):
        load("gpt2", task="sleep")
    with pytest.raises(BadInput, match=r"dtype 'int8': allowed are bf16, fp16, fp32"):
        load("gpt2", dtype="int8")


def test_a_function_owns_its_sizes():
    with pytest.raises(BadInput, match="leave out --batch and --dtype"):
        load("mine.py:make", batch=2, dtype="bf16")


def test_presets_are_found_in_any_case():
    target = load("LLaMA-3.2-1B", batch=3, seq=32)
    assert target.name == "llama-3.2-1b" and "llama-3.2-1b" in PRESETS
    assert "batch 3 × 32, bf16, SDPA attention, task train" in target.setup


def test_a_live_model_is_used_itself():
    model = nn.Linear(3, 1)
    target = from_model(model, torch.ones(2, 3), loss_fn=lambda m, b: m(b["input"]).sum())
    assert target.make_model() is model and target.name == "Linear"
    assert torch.equal(target.loss(model, target.make_batch()), model(torch.ones(2, 3)).sum())


def test_a_live_model_that_is_none():
    with pytest.raises(BadInput, match="str is no torch"):
        from_model("gpt2", torch.ones(1))
    with pytest.raises(BadInput, match="task 'sleep'"):
        from_model(nn.Linear(1, 1), torch.ones(1), task="sleep")
    with pytest.raises(BadInput, match="the batch is int"):
        from_model(nn.Linear(1, 1), 7)

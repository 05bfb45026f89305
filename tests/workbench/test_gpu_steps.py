"""The steps of a GPU, run on the CPU with doubles of torch.cuda: their order and what they see."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from nearlight.core.op import Case
from nearlight.workbench import gpu_steps
from nearlight.workbench.load import load_op
from nearlight.workbench.trial import Trial

TRIAL = Trial(Case("small", {"rows": 4, "columns": 6}, torch.float32))


@pytest.fixture(scope="module")
def op_of():
    """Return `(function) -> Op` over the inputs of the sound twin."""
    record = load_op(f"{Path(__file__).with_name('twins.py')}")
    twin = sys.modules[record.reference.__module__].twin("")
    return lambda function: dataclasses.replace(twin, function=function)


def multiply(x, weight):
    return x * weight


class Recorded(TorchDispatchMode):
    """A CUDA graph on the CPU: what ran is run again, into the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        for func, args, kwargs, out in self.calls:
            out.detach().copy_(func(*args, **kwargs))


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append("wait")

    def synchronize(self):
        self.log.append("synchronize stream")


@pytest.fixture
def gpu(monkeypatch):
    """Let the steps of a GPU run on the CPU, and return the order of what they did."""
    log = []
    doubles = {
        "device": lambda device: contextlib.nullcontext(log.append(f"current {device}")),
        "Stream": lambda: Stream(log),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda: Stream(log),
        "synchronize": lambda: log.append("synchronize"),
        "_sleep": lambda cycles: log.append("sleep"),
        "CUDAGraph": Recorded,
        "graph": lambda graph: graph,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    return log


def test_a_graph_is_replayed_on_new_values(op_of, gpu):
    def bakes_in(x, weight):
        return x * torch.tensor(weight.tolist()) + 0 * weight

    step = gpu_steps.GPU_STEPS["graph"]
    assert step(op_of(multiply), TRIAL, "cpu") == ""
    assert step(op_of(bakes_in), TRIAL, "cpu").startswith("a replay on new values: output")


def test_what_breaks_a_capture_is_told(op_of, gpu):
    def waits(x, weight):
        if isinstance(_get_current_dispatch_mode(), Recorded):
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * weight

    reason = gpu_steps.GPU_STEPS["graph"](op_of(waits), TRIAL, "cpu")
    assert reason == (
        "cannot be captured: RuntimeError: operation not permitted when stream is capturing"
    )


def test_a_late_stream_is_filled_after_the_sleep(op_of, gpu, monkeypatch):
    fill, step = gpu_steps._fill, gpu_steps.GPU_STEPS["stream"]

    def logged(memory, expected):
        gpu.append("fill")
        fill(memory, expected)

    def function(x, weight):
        gpu.append("call")
        return multiply(x, weight)

    monkeypatch.setattr(gpu_steps, "_fill", logged)
    assert step(op_of(function), TRIAL, "cpu") == ""
    steps = ["synchronize", "call", "sleep", "fill", "call", "synchronize stream"]
    assert gpu == ["current cpu", *steps]
    # What a kernel on another stream would have read.
    monkeypatch.setattr(gpu_steps, "_fill", lambda memory, expected: None)
    reason = step(op_of(function), TRIAL, "cpu")
    assert reason.startswith("a kernel on another stream than the current one: output")


def test_a_device_that_is_not_current_gets_the_inputs(op_of, gpu, monkeypatch):
    standard, asked = gpu_steps.standard, []

    def on_cpu(op, trial, device):
        asked.append(device)
        return standard(op, trial, "cpu")

    monkeypatch.setattr(gpu_steps, "standard", on_cpu)
    for step in gpu_steps.DEVICE_STEPS.values():
        assert step(op_of(multiply), TRIAL, "cuda") == ""
    assert (asked, gpu) == (["cuda:1", "cuda:0"], ["current 0", "current 1"])

import pytest
import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu
from nearlight.core.report import State
from nearlight.fixes import program
from nearlight.fixes.fix import Fix
from nearlight.fixes.kernels import FIXES
from nearlight.fixes.program import Measured, Predicted, applied
from nearlight.nn import is_patched
from nearlight.profiler.target import from_model

BY_NAME = {fix.name.removeprefix("patch:"): fix for fix in FIXES}


def noting(name, log):
    def apply(model):
        log.append(f"+{name}")
        return lambda: log.append(f"-{name}")

    return Fix(name, "exact", apply)


def test_fixes_are_undone_in_reverse_order():
    log = []
    with applied(nn.Linear(1, 1), [noting("a", log), noting("b", log)]):
        assert log == ["+a", "+b"]
    assert log == ["+a", "+b", "-b", "-a"]


def test_fixes_are_undone_when_the_program_fails():
    log = []
    with pytest.raises(RuntimeError, match="inside"), applied(None, [noting("a", log)]):
        raise RuntimeError("inside")
    assert log == ["+a", "-a"]


def test_what_stands_is_undone_when_a_later_fix_fails():
    log = []

    def fails(model):
        raise RuntimeError("half-way")

    fixes = [noting("a", log), Fix("b", "exact", fails), noting("c", log)]
    with pytest.raises(RuntimeError, match="half-way"), applied(nn.Linear(1, 1), fixes):
        pytest.fail("the block must not run")
    assert log == ["+a", "-a"]


def test_a_prediction_keeps_its_limit_and_falls_in_memory_and_time(make_model):
    # A step that kernels fill, not the host.
    ids = torch.zeros(64, 64, dtype=torch.long)
    model = make_model("Llama", vocab_size=8192)
    target = from_model(model, {"input_ids": ids, "labels": ids})
    seen = Predicted(target, find_gpu("h200"))
    before = seen.state([])
    loss = BY_NAME["linear_cross_entropy"]
    after = seen.state([loss])
    assert after.limit_ms == before.limit_ms > 0
    assert after.peak_bytes < before.peak_bytes
    assert before.share <= after.share <= 1
    gain = seen.gain([], loss)
    assert gain.ms == before.step_ms - after.step_ms
    assert gain.bytes == before.peak_bytes - after.peak_bytes > 0
    assert gain.spread_ms == 0
    assert not any(is_patched(module) for module in model.modules())


def test_a_state_is_predicted_once(make_target, monkeypatch):
    seen = Predicted(make_target(), find_gpu("h200"))
    calls = []
    original = program.trace
    monkeypatch.setattr(program, "trace", lambda *a, **k: calls.append(1) or original(*a, **k))
    fixes = [BY_NAME["rms_norm"]]
    assert seen.state(fixes) == seen.state(fixes)
    seen.gain([], fixes[0])
    assert len(calls) == 1


class OnCpu:
    """A step in the place of the measured one, on the CPU: trains, and takes gradients off."""

    def __init__(self, target, model, batch):
        self.target, self.model, self.batch = target, model, batch
        self.released = 0

    def block(self, steps):
        self.target.loss(self.model, self.batch).backward()
        self.model.zero_grad(set_to_none=True)
        slow = not is_patched(self.model.layers[0])
        return (3.0 if slow else 2.0), (100 if slow else 60)

    def release(self):
        self.released += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(4), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def measured(monkeypatch):
    """Return a program measured on this machine's imagined GPU, with its model."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    model = Net().eval()
    model(x).sum().backward()
    target = from_model(model, {"x": x}, loss_fn=lambda m, b: m(b["x"]).square().sum())
    monkeypatch.setattr(program, "Step", OnCpu)
    monkeypatch.setattr(program, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return Measured(target, find_gpu("h200")), model


def test_measured_gains_alternate_and_the_model_comes_back_as_it_was(measured):
    seen, model = measured
    assert all(p.grad is None for p in model.parameters()), "a step starts without gradients"
    assert all(module.training for module in model.modules())
    gain = seen.gain([], BY_NAME["layer_norm"])
    assert (gain.ms, gain.bytes, gain.spread_ms) == (1.0, 40, 0.0)
    assert model.layers[1].num_batches_tracked == 2 * program.BLOCKS
    assert not is_patched(model.layers[0])
    seen.close()
    assert model.layers[1].num_batches_tracked == 0
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_that_does_not_fit_is_predicted(measured, monkeypatch):
    seen, model = measured

    def out_of_memory(*args):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(program, "measure_state", out_of_memory)
    monkeypatch.setattr(OnCpu, "block", out_of_memory)
    state = seen.state([])
    assert isinstance(state, State) and state.mode == "predicted"
    assert seen.gain([], BY_NAME["layer_norm"]).spread_ms == 0
    assert seen._step.released == 2
    assert not is_patched(model.layers[0])


def test_a_live_model_on_the_cpu_of_a_machine_with_a_gpu_is_bad_input():
    model = nn.Linear(2, 2)
    target = from_model(model, torch.ones(1, 2), loss_fn=lambda m, b: m(b["input"]).sum())
    with pytest.raises(BadInput, match=r"Linear lies on cpu .* model\.cuda\(\), or give gpu="):
        Measured(target, find_gpu("h200"))

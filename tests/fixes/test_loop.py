from dataclasses import replace

import pytest
import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu
from nearlight.core.report import Finding, Proof, State
from nearlight.fixes import loop
from nearlight.fixes.fix import Fix, NothingToDo
from nearlight.fixes.program import Gain
from nearlight.nn import is_patched, unpatch
from nearlight.profiler.rules import does_not_fit

FAST = Gain(ms=2.0, bytes=2**20, spread_ms=0.1)


def state(step_ms, peak_bytes):
    return State("predicted", step_ms, 1e3, 1.0, peak_bytes, 1.0, 1.0 / step_ms)


def finding(fix, gain_ms=1.0):
    return Finding(f"title of {fix}", "evidence", "cause", fix, gain_ms, 0)


class FakeProgram:
    """A program whose gains are given; notes what it is asked."""

    def __init__(self, gains, peak_bytes=2**30):
        self.gains, self.peak_bytes = gains, peak_bytes
        self.asked, self.log = [], []

    def state(self, fixes):
        saved = sum(self.gains[fix.name].ms for fix in fixes)
        return state(20.0 - saved, self.peak_bytes)

    def traced(self, fixes):
        return [fix.name for fix in fixes]

    def gain(self, fixes, fix):
        self.asked.append(([f.name for f in fixes], fix.name))
        gain = self.gains[fix.name]
        if isinstance(gain, Exception):
            raise gain
        return gain

    def release(self):
        self.log.append("release")

    def close(self):
        self.log.append("close")


@pytest.fixture
def optimize(monkeypatch, make_target):
    """Run the loop on a fake program; returns the report."""

    def run(program, findings, prove=None, target=None):
        fixes = {name: Fix(name, "exact", lambda model: lambda: None) for name in program.gains}
        monkeypatch.setattr(loop, "FIXES", fixes)
        monkeypatch.setattr(loop, "Predicted", lambda target, gpu: program)
        if findings is not None:
            monkeypatch.setattr(loop.rules, "find", lambda trace, state, gpu: findings)
        passes = Proof(True, [{"name": "loss", "passed": True, "reason": ""}], "tried")
        monkeypatch.setattr(loop, "prove", prove or (lambda *a: passes))
        return loop.optimize_target(target or make_target(), "h200")

    return run


def test_fixes_are_tried_in_the_order_of_the_findings_on_top_of_one_another(optimize):
    program = FakeProgram({"a": FAST, "b": FAST, "c": FAST})
    report = optimize(program, [finding("b", 9.0), finding("a", 5.0), finding("c", 1.0)])
    assert program.asked == [([], "b"), (["b"], "a"), (["b", "a"], "c")]
    assert [f.fix for f in report.findings] == ["b", "a", "c"]
    assert all(f.applied and "saved 2.00 ms and 1 MiB" in f.note for f in report.findings)
    assert (report.before.step_ms, report.after.step_ms) == (20.0, 14.0)
    assert program.log == ["release", "close"], "memory is given back before the proof"


def test_a_fix_that_does_not_gain_is_undone_with_the_reason(optimize):
    noise = Gain(ms=0.05, bytes=0, spread_ms=0.1)
    slower = Gain(ms=-1.0, bytes=2**20, spread_ms=0.1)
    program = FakeProgram({"a": noise, "b": slower, "c": FAST})
    report = optimize(program, [finding("a"), finding("b"), finding("c")])
    notes = {f.fix: (f.applied, f.note) for f in report.findings}
    assert notes["a"] == (
        False, "undone: it saved 0.05 ms and 0 MiB on top of the ones before, noise 0.10 ms"
    )  # fmt: skip
    assert notes["b"][0] is False and "-1.00 ms" in notes["b"][1]
    assert notes["c"][0] is True
    assert program.asked[-1] == ([], "c"), "what was undone is not there any more"


def test_memory_alone_is_a_gain(optimize):
    program = FakeProgram({"a": Gain(ms=-0.05, bytes=2**30, spread_ms=0.1)})
    assert optimize(program, [finding("a")]).findings[0].applied


def test_where_the_program_does_not_fit_memory_is_worth_time(optimize):
    slower = Gain(ms=-1.0, bytes=2**30, spread_ms=0.1)
    assert not optimize(FakeProgram({"a": slower}), [finding("a")]).findings[0].applied
    too_large = find_gpu("h200").memory_bytes
    assert optimize(FakeProgram({"a": slower}, too_large), [finding("a")]).findings[0].applied


def test_nothing_to_do_is_told(optimize):
    program = FakeProgram({"a": NothingToDo("activation is GELU"), "b": FAST})
    report = optimize(program, [finding("a"), finding("b")])
    assert not report.findings[0].applied
    assert report.findings[0].note == "not applied: activation is GELU"
    assert report.findings[1].applied


def test_findings_without_a_fix_stay_open(optimize):
    blocking = replace(finding(""), title="does not fit: 200 GiB", gain_ms=0.0)
    report = optimize(FakeProgram({"b": FAST}), [blocking, finding("b")])
    assert report.findings[0] == blocking, "what does not fit stays first"
    assert report.findings[1].applied


def test_two_findings_with_one_fix_apply_it_once(optimize):
    program = FakeProgram({"a": FAST})
    report = optimize(program, [finding("a", 3.0), finding("a", 1.0)])
    assert [f.applied for f in report.findings] == [True, True]
    assert len(program.asked) == 1 and report.findings[1].note == "a stands already"


def test_off_applies_nothing(optimize, monkeypatch):
    monkeypatch.setenv("NEARLIGHT", "off")
    program = FakeProgram({"a": FAST})
    report = optimize(program, [finding("a")])
    assert program.asked == [] and report.proof is None
    assert report.findings[0].note == "NEARLIGHT=off: nothing is applied"
    assert report.after == report.before


def failing(*bad):
    """Prove everything but sets that hold all of `bad`; notes the sets."""
    tried = []

    def prove(target, fixes, device, progress):
        names = [fix.name for fix in fixes]
        tried.append(names)
        passed = not set(bad) <= set(names)
        row = {"name": "logits", "passed": passed, "reason": "" if passed else "whole 1 > 0.1"}
        return Proof(passed, [row], "tried")

    prove.tried = tried
    return prove


def test_a_fix_that_changes_results_is_undone_and_the_sound_ones_stay(optimize):
    program, prove = FakeProgram({"a": FAST, "b": FAST, "c": FAST}), failing("b")
    report = optimize(program, [finding("a"), finding("b"), finding("c")], prove)
    assert prove.tried == [["a", "b", "c"], ["a"], ["a", "b"], ["a", "c"]]
    assert [f.applied for f in report.findings] == [True, False, True]
    assert report.findings[1].note == "undone: the proof fails at logits: whole 1 > 0.1"
    assert report.proof.passed and report.after.step_ms == 16.0
    assert "results proved the same" in report.answer
    assert "only=['a', 'c']" in report.next


def test_fixes_that_fail_only_together_do_not_stay_together(optimize):
    report = optimize(
        FakeProgram({"a": FAST, "b": FAST}), [finding("a"), finding("b")], failing("a", "b")
    )
    assert [f.applied for f in report.findings] == [True, False]
    assert report.proof.passed


def test_when_every_fix_fails_the_program_stays_and_the_proof_says_so(optimize):
    report = optimize(FakeProgram({"a": FAST}), [finding("a")], failing("a"))
    assert not report.findings[0].applied
    assert not report.proof.passed
    assert report.after == report.before
    assert "every fix failed the proof and is undone" in report.answer
    assert report.next.startswith("next: report the first row of the proof")


def test_a_proof_that_was_not_run_is_not_hidden(optimize):
    report = optimize(
        FakeProgram({"a": FAST}), [finding("a")], lambda *a: Proof(False, [], "not run: no memory")
    )
    assert report.findings[0].applied
    assert report.answer.endswith("NOT PROVED")
    assert "not run: no memory" in report.next and "do not use" in report.next


def test_the_program_is_closed_when_something_fails(optimize):
    program = FakeProgram({"a": FAST})

    def fails(*args):
        raise RuntimeError("in the proof")

    with pytest.raises(RuntimeError, match="in the proof"):
        optimize(program, [finding("a")], fails)
    assert program.log[-1] == "close"


def test_answer_and_next_step(optimize):
    report = optimize(FakeProgram({"a": FAST}), [finding("a")])
    assert report.answer == (
        "LlamaForCausalLM on h200: 20.0 ms → 18.0 ms a step (1.11 × as fast), "
        "1.00 GiB → 1.00 GiB, "
        "predicted; results proved the same"
    )
    assert report.next == "next: nearlight.patch(model, only=['a']) after the model is built"
    nothing = optimize(FakeProgram({}), [])
    assert nothing.answer == (
        "LlamaForCausalLM on h200: 20.0 ms a step (predicted), 1.00 GiB; nothing to apply"
    )
    # A live model has no name that the command line knows.
    assert nothing.next.startswith("next: nearlight.predict(model, batch")


def test_a_name_has_no_model_to_keep():
    with pytest.raises(BadInput, match="needs a live model"):
        loop.optimize("smollm2-135m", keep=True)


def test_arguments_that_cannot_be_used_are_one_clear_line():
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(BadInput, match="unknown GPU 'h20o': did you mean .*h200"):
        loop.optimize(model, x, gpu="h20o")
    with pytest.raises(BadInput, match="Linear: all parameters are frozen"):
        loop.optimize(nn.Linear(2, 1).requires_grad_(False), x, gpu="h200")
    with pytest.raises(BadInput, match="Linear: the batch is empty"):
        loop.optimize(model, x[:0], gpu="h200")
    with torch.no_grad(), pytest.raises(BadInput, match=r"torch\.no_grad\(\)"):
        loop.optimize(model, x, gpu="h200")
    with pytest.raises(BadInput, match="t4 has no bf16: take --dtype fp16"):
        loop.optimize("gpt2", gpu="t4")


def test_a_detached_loss_is_told_and_a_tuple_has_its_loss_first():
    class Pair(nn.Linear):
        is_detached = True

        def forward(self, input):
            logits = super().forward(input)
            loss = logits.square().mean()
            return (loss.detach() if self.is_detached else loss), logits

    model = Pair(2, 1)
    with pytest.raises(BadInput, match="Pair: no gradient flows from the loss"):
        loop.optimize(model, torch.ones(3, 2), gpu="h200")
    model.is_detached = False
    assert loop.optimize(model, torch.ones(3, 2), gpu="h200").before.step_ms > 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_live_model_from_end_to_end(keep, make_model):
    model = make_model(vocab_size=512).eval()
    ids = torch.randint(3, 512, (64, 48), generator=torch.Generator().manual_seed(1))
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    told = []
    report = loop.optimize(
        model, {"input_ids": ids, "labels": ids}, gpu="h200", keep=keep, progress=told.append
    )
    applied = {f.fix for f in report.findings if f.applied}
    assert applied and report.proof.passed, report.proof
    assert "32 tokens" in report.proof.method and told
    assert report.mode == "predicted" and report.after.limit_ms == report.before.limit_ms
    assert report.after.peak_bytes <= report.before.peak_bytes
    assert report.to_json()
    assert any(is_patched(module) for module in model.modules()) is keep
    unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_a_planted_fault_is_found_by_the_real_proof(make_model, fault, monkeypatch):
    """It promises most and gains, so only the proof stands between it and the user."""
    planted = fault("layers.1.mlp", lambda out: out * 1.01)
    monkeypatch.setitem(loop.FIXES, planted.name, planted)
    original = loop.rules.find
    monkeypatch.setattr(loop.rules, "find", lambda *a: [finding(planted.name, 99.0), *original(*a)])
    measured = loop.Predicted.gain
    monkeypatch.setattr(
        loop.Predicted, "gain",
        lambda self, fixes, fix: FAST if fix is planted else measured(self, fixes, fix),
    )  # fmt: skip
    model = make_model(vocab_size=512)
    ids = torch.randint(3, 512, (64, 32), generator=torch.Generator().manual_seed(1))
    report = loop.optimize(model, {"input_ids": ids, "labels": ids}, gpu="h200")
    refused, *others = report.findings
    assert not refused.applied and refused.note.startswith("undone: the proof fails at ")
    assert any(f.applied for f in others)
    assert report.proof.passed


def test_a_model_no_fix_fits_has_findings_and_no_proof():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    target = loop.targets.from_model(
        model, torch.zeros(4, 64), loss_fn=lambda m, b: m(b["input"]).sum()
    )
    report = loop.optimize_target(target, "h200")
    assert report.proof is None and not any(f.applied for f in report.findings)
    assert "nothing to apply" in report.answer


def test_what_the_fixes_made_untrue_is_not_told_as_open(optimize, monkeypatch):
    program = FakeProgram({"a": FAST})
    casts, launches = finding("", 9.0), replace(finding("", 3.0), title="many launches")
    full = replace(finding("", 0.0), title=f"{does_not_fit.TITLE} on h200")
    left = replace(launches, gain_ms=1.0)

    def found(trace, state, gpu):
        return [left] if trace == ["a"] else [full, casts, finding("a", 5.0), launches]

    monkeypatch.setattr(loop.rules, "find", found)
    report = optimize(program, None)
    assert [(f.title, f.gain_ms, f.applied) for f in report.findings] == [
        (full.title, 0.0, True), ("title of a", 5.0, True), ("many launches", 1.0, False),
    ]  # fmt: skip
    assert report.findings[0].note == "not so any more with the fixes"


def test_a_loss_function_serves_a_live_model_without_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    with pytest.raises(BadInput, match="loss"):
        loop.optimize(model, x, gpu="h200")
    report = loop.optimize(
        model, x, loss_fn=lambda model, batch: model(batch["input"]).square().mean(), gpu="h200"
    )
    assert report.before.step_ms > 0


def test_small_steps_are_told_in_microseconds():
    assert (loop._duration(0.0412), loop._duration(41.2)) == ("41 µs", "41.2 ms")

"""The search of `tune` on a CPU: what is tried, what is dropped, what is kept, what a row says."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from nearlight import ops
from nearlight.cli import app
from nearlight.core import backend, timing, tuned
from nearlight.core.cost import Cost
from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.op import Case, Op
from nearlight.core.timing import Timing
from nearlight.core.triton import Kernel
from nearlight.workbench import tune as tune_module
from nearlight.workbench.trial import Trial, make_inputs
from nearlight.workbench.tune import cases_named, search, tune
from nearlight.workbench.tune_report import Found, report_of
from nearlight.workbench.work import Machine, expected_of

H200 = find_gpu("h200")
MACHINE = Machine("cpu", H200)
CASE = Case("6x40", {"rows": 6, "columns": 40}, torch.float32)
WRONG, RAISES, SPILLS, ILLEGAL = 7, 13, 17, 99
launched: list[tuple[str, int]] = []
compiled: list[SimpleNamespace] = []


@dataclass(frozen=True)
class Config:
    block: int


def candidates(shape, dtype, gpu, direction):
    blocks = (1, 2, 3, 4, 5, 6, WRONG, RAISES, SPILLS)
    return {**{Config(block): "" for block in blocks}, Config(ILLEGAL): "too much shared memory"}


@tuned.tunable("double", candidates)
def config(shape, dtype, gpu, direction):
    return Config(4)


def launch(x, direction):
    block = config(tuple(x.shape), x.dtype, launch_gpu(x.device), direction).block
    launched.append((direction, block))
    compiled.append(SimpleNamespace(n_spills=8 if block == SPILLS else 0))
    if block == RAISES:
        raise RuntimeError("out of resource: shared memory")
    return (3 if block == WRONG else 2) * x


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return launch(x, "forward")

    @staticmethod
    def backward(ctx, upstream):
        return launch(upstream, "backward")


def make_op(function=_Double.apply, name="double") -> Op:
    cost = Cost({"fp32": 240}, bytes_read=960, bytes_written=960)

    def inputs(case, device, generator):
        shape = (case.shape["rows"], case.shape["columns"])
        return {"x": torch.randn(shape, generator=generator, device=device).requires_grad_()}

    return Op(
        name=name,
        function=lambda x: function(x),
        reference=lambda x: 2 * x,
        make_inputs=inputs,
        cases=[CASE],
        check_cases=[CASE],
        cost=lambda case: {"forward": cost, "forward_backward": cost},
        extra_bytes=lambda case: 0,
    )


OP = make_op()


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    for name in ("user_path", "package_path"):
        path_of = lambda op, gpu, room=tmp_path / name: room / gpu / f"{op}.json"  # noqa: E731 - two paths of one kind
        monkeypatch.setattr(tuned, name, path_of)
    monkeypatch.setattr(tune_module, "_compiled", noted)
    tuned._rows.cache_clear()
    yield
    tuned._rows.cache_clear()
    tuned.forget()


@contextmanager
def noted():
    compiled.clear()
    yield compiled


class Timer:
    """Times by block: what a launch takes is known before, but each is launched all the same."""

    def __init__(self, **times_us: float):
        self.times_us = {f"block={name[1:]}": us for name, us in times_us.items()}
        self.method = "cpu clock"
        self.rounds: list[list[str]] = []

    def __call__(self, calls, *, device, min_repeats, max_seconds=2.0):
        assert device == "cpu"
        self.rounds.append(list(calls))
        for name, rotated in calls.items():
            launched.clear()
            for call in rotated:
                call()
            assert len(rotated) == 3 and name in {f"block={block}" for _, block in launched}
        return {name: self._timing(name) for name in calls}

    def _timing(self, name: str) -> Timing:
        us = self.times_us.get(name, 20.0)
        return Timing(us, us, us, (us,) * 20, self.method)


def test_each_launch_is_searched_once_in_its_own_direction():
    found = list(search(OP, MACHINE, [CASE, CASE], Timer()))
    assert [(each.asked.key, each.direction) for each in found] == [
        ("config (6, 40) float32 forward", "forward"),
        ("config (6, 40) float32 backward", "forward_backward"),
    ]


def test_a_launch_of_both_directions_is_timed_in_both():
    class Same(_Double):
        @staticmethod
        def backward(ctx, upstream):
            return launch(upstream, "forward")

    found = list(search(make_op(Same.apply), MACHINE, timer=Timer()))
    assert [each.direction for each in found] == ["forward_backward"]


def test_a_forward_that_does_the_backwards_work_is_timed_with_it():
    class Early(_Double):
        @staticmethod
        def backward(ctx, upstream):
            return 2 * upstream

    found = list(search(make_op(Early.apply), MACHINE, timer=Timer()))
    assert [each.direction for each in found] == ["forward_backward"]


def test_the_fastest_right_candidate_is_kept():
    timer = Timer(_7=1.0, _13=1.0, _17=1.0, _99=1.0, _2=10.0, _5=11.0, _4=12.0)
    found = next(search(OP, MACHINE, timer=timer))
    assert found.kept == Config(2) and not found.rule_is_best
    assert found.rule_loss == pytest.approx(0.2) and not found.passed
    assert found.num_timed == 6  # neither what is wrong, nor what raises, spills, is illegal
    assert found.dropped[Config(ILLEGAL)] == "too much shared memory"
    assert found.dropped[Config(WRONG)].startswith("wrong: output: ")
    assert found.dropped[Config(RAISES)] == "RuntimeError: out of resource: shared memory"
    assert found.dropped[Config(SPILLS)] == "spills 32 bytes a thread, the rule's launch 0"
    assert not set(timer.rounds[0]) & {f"block={each}" for each in (WRONG, RAISES, SPILLS, ILLEGAL)}


def test_the_best_are_timed_again_and_the_rule_with_them():
    timer = Timer(_1=1.0, _2=2.0, _3=3.0, _5=5.0, _6=6.0, _4=40.0)
    list(search(OP, MACHINE, timer=timer))
    assert len(timer.rounds[0]) == 6
    assert timer.rounds[1] == [f"block={block}" for block in (1, 2, 3, 5, 6, 4)]


def test_what_is_not_faster_beyond_the_spread_leaves_the_rule():
    found = next(search(OP, MACHINE, timer=Timer(_2=19.9)))
    assert found.fastest == Config(2)
    assert found.kept == Config(4) and found.rule_is_best and found.rule_loss == 0 and found.passed


def test_a_rule_within_the_allowed_loss_passes():
    found = next(search(OP, MACHINE, timer=Timer(_2=19.2)))
    assert found.kept == Config(2) and found.rule_loss == pytest.approx(0.0417, abs=1e-3)
    assert found.passed


def test_a_wrong_rule_is_a_fault_and_nothing_is_timed():
    op = replace(OP, reference=lambda x: 2.5 * x)
    timer = Timer()
    found = list(search(op, MACHINE, timer=timer))
    assert all(each.fault.startswith("the rule's launch: wrong: output: ") for each in found)
    assert not timer.rounds
    report = report_of(op, H200, found, {})
    assert not report.proof.passed and "2 without a row" in report.answer


def test_what_turns_wrong_while_it_is_timed_is_not_kept():
    timed = []

    def tires(x):
        return _Double.apply(x) * (3 if timed else 1)

    def timer(calls, **options):
        timed.append(1)
        return {name: Timing(5.0, 5.0, 5.0, (5.0,) * 9, "cpu clock") for name in calls}

    found = next(search(make_op(tires), MACHINE, timer=timer))
    assert found.fault.startswith("block=4 after the timing: output: ")


def test_a_time_below_the_limit_is_refused():
    timer = Timer(_2=1e-4)
    timer.method = "events"
    assert "below the limit" in next(search(OP, MACHINE, timer=timer)).fault


def test_a_real_timer_tells_a_slow_launch_from_a_fast_one():
    @tuned.tunable("sleep", lambda shape, gpu: {Config(1): ""})
    def rule(shape, gpu):
        return Config(20)

    def sleeps(x):
        time.sleep(rule(tuple(x.shape), None).block / 1000)
        return 2 * x

    def timer(calls, **options):
        options |= {"min_repeats": 9, "max_seconds": 0.0, "flush_bytes": 0}
        return timing.compare(calls, **options)

    found = list(search(make_op(sleeps), MACHINE, timer=timer))
    assert [each.kept for each in found] == [Config(1)]
    assert found[0].rule_loss > 1 and found[0].timings[Config(1)].method == "cpu clock"


def test_bad_input_is_refused_with_what_to_do(monkeypatch):
    with pytest.raises(BadInput, match="asks no launch rule that can be tuned: decorate"):
        list(search(make_op(lambda x: 2 * x), MACHINE, timer=Timer()))
    monkeypatch.setattr(tune_module, "MAX_CANDIDATES", 8)
    with pytest.raises(BadInput, match="9 candidates, allowed are 8; list fewer"):
        list(search(OP, MACHINE, timer=Timer()))


def test_cases_by_name_and_by_sizes():
    assert cases_named(OP, []) is None
    by_sizes = "rows=3,columns=50"
    assert cases_named(OP, ["6x40", by_sizes]) == [
        CASE, replace(CASE, name=by_sizes, shape={"rows": 3, "columns": 50})
    ]  # fmt: skip
    for wrong in ("7x40", "rows=3", "rows=3,columns=x"):
        with pytest.raises(BadInput, match=r"allowed are 6x40, or sizes \(rows=6,columns=40\)"):
            cases_named(OP, [wrong])


def test_what_is_found_is_written_dated_and_taken(monkeypatch):
    found = list(search(OP, MACHINE, timer=Timer(_2=10.0)))
    measured_on = {"torch": "2.13", "triton": "3.7", "driver": "580", "commit": "abc", "date": "d"}
    monkeypatch.setattr(tune_module, "require_gpu", lambda *_: H200)
    monkeypatch.setattr(tune_module, "versions", lambda on_gpu: measured_on)
    monkeypatch.setattr(tune_module, "search", lambda *args, **options: found)
    arguments = (6, 40), torch.float32, H200
    assert config(*arguments, "forward") == Config(4)
    report = tune(OP)
    assert config(*arguments, "forward") == config(*arguments, "backward") == Config(2)
    row = json.loads(tuned.user_path("double", "h200").read_text())["rows"][0]
    assert row["config"] == {"block": 2} and row["rule"] == {"block": 4}
    assert (row["time_us"], row["low_us"], row["high_us"], row["rule_us"]) == (10, 10, 10, 20)
    assert row["next_best"] == {"block": 4} or row["next_us"] == 20
    assert row["gpu"] == "h200" and row["versions"] == measured_on
    assert not report.proof.passed and report.rows[0]["remark"].startswith("the rule is too slow")
    assert report.answer == (
        "double on NVIDIA H200: 2 launches, the rule is best in 0 and at most 100.0% slower than "
        "the best"
    )
    assert json.loads(report.to_json())["rows"][0]["config"] == "block=2"
    tune(OP, into_repo=True)
    assert tuned.package_path("double", "h200").is_file()


def test_a_search_that_is_stopped_keeps_what_it_found(monkeypatch):
    found = next(search(OP, MACHINE, timer=Timer(_2=10.0)))

    def stopped(*args, **options):
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_module, "require_gpu", lambda *_: H200)
    monkeypatch.setattr(tune_module, "versions", lambda on_gpu: {})
    monkeypatch.setattr(tune_module, "search", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(OP)
    assert list(tuned.read(tuned.user_path("double", "h200"))) == [found.asked.key]


def test_what_triton_compiled_is_noted(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(Kernel, "_start", lambda self, grid, *rest: grid)
    with tune_module._compiled() as kernels:
        assert Kernel._start(None, "compiled", False, (), {}) == "compiled"
    assert kernels == ["compiled"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(MissingPart, match="tune measures a GPU"):
        tune(OP)
    result = CliRunner().invoke(app, ["tune", "rms_norm", "--cases", "rows=300,N=1000"])
    assert isinstance(result.exception, MissingPart)
    result = CliRunner().invoke(app, ["tune", "rms_norm", "--cases", "300"])
    assert isinstance(result.exception, BadInput)


# Tiles of several rows, several tiles of a row, and rows too wide for one tile.
SHAPES = {
    "add_layer_norm": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "add_rms_norm": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "adamw": [{"tensors": 2, "rows": 5, "N": 300}],
    "cross_entropy": [{"M": 3, "V": 2500}, {"M": 3, "V": 5}, {"M": 2, "V": 2501}],
    "dropout": [{"rows": 9, "N": 3000}],
    "dropout_add": [{"rows": 9, "N": 3000}],
    "embedding": [{"T": 40, "V": 9, "D": 3000}],
    "group_norm": [{"N": 2, "C": 32, "S": 300}],
    "rms_norm": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "layer_norm": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "swiglu": [{"rows": 9, "N": 3000}],
    "geglu": [{"rows": 9, "N": 3000}],
    "gelu": [{"rows": 9, "N": 3000}],
    "relu2": [{"rows": 9, "N": 3000}],
    "silu": [{"rows": 9, "N": 3000}],
    "softmax": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "log_softmax": [{"rows": 9, "N": 3000}, {"rows": 1, "N": 17_000}],
    "rope": [{"B": 1, "S": 20, "H": 20, "HK": 5, "D": 64}],
    "linear_cross_entropy": [{"BT": 3, "H": 16, "V": 2500}],
    "linear_log_prob": [{"BT": 3, "H": 16, "V": 2500}],
}


@pytest.mark.parametrize(
    "name, shape", [(name, shape) for name in ops.OPS for shape in SHAPES[name]]
)
def test_every_candidate_of_our_ops_is_right(name, shape):
    """Interpreted on a small shape; the launches are those that an H200 would try there."""
    op = ops.OPS[name]
    case = replace(op.cases[0], name=str(shape), shape=shape)
    inputs = make_inputs(op, Trial(case), "cpu")
    with backend.force("triton"):
        all_asked = list(tune_module._asked(op, inputs, Trial(case)))
        assert all_asked
        expected, _ = expected_of(op, inputs, Trial(case), True)
        for asked, direction in all_asked:
            listed = asked.choice.candidates(**{**asked.arguments, "gpu": H200})
            place = Found(asked, case, direction, None)
            # The interpreter knows neither warps nor pipelines.
            alike = {
                str({**asdict(each), "num_warps": 0, "num_stages": 0}): each
                for each, reason in listed.items()
                if not reason
            }
            assert alike
            for each in alike.values():
                fault = tune_module._fault(op, MACHINE, place, expected, True, each)
                assert fault == ("", 0), each

"""The plumbing of `bench` on a CPU: what is checked, what is refused, what a row says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nearlight.core import backend, timing
from nearlight.core.cost import Cost
from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import find_gpu
from nearlight.core.numerics import NUM_DRAWS
from nearlight.core.op import Case, Op
from nearlight.workbench import bench as bench_module
from nearlight.workbench import compare
from nearlight.workbench.bench import bench, measure
from nearlight.workbench.work import Machine

H200 = find_gpu("h200")
MACHINE = Machine("cpu", H200)
CASE = Case("6x40", {"rows": 6, "columns": 40}, torch.float32)
COST = Cost({"fp32": 240}, bytes_read=960, bytes_written=960)


def make_inputs(case, device, generator):
    shape = (case.shape["rows"], case.shape["columns"])
    x = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
    return {"x": x.requires_grad_()}


def double(x, backend="auto"):
    return 2 * x


def absent_peer():
    raise ImportError("No module named 'absent'")


def op_with(function=double, **peers) -> Op:
    return Op(
        name="double",
        function=function,
        reference=lambda x: 2 * x,
        make_inputs=make_inputs,
        cases=[CASE],
        check_cases=[CASE],
        cost=lambda case: {"forward": COST, "forward_backward": COST},
        extra_bytes=lambda case: 0,
        peers=peers,
    )


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch):
    # Inductor's compile on a CPU takes half a minute and is none of these tests' business.
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(bench_module, "MIN_REPEATS", 2)


def by_name(rows, direction="forward"):
    return {
        row["implementation"]: row
        for row in rows
        if row["direction"] == direction and "host cost" not in row["case"]
    }


def test_rows_hold_time_share_ratios_and_the_copy():
    rows = measure(op_with(), MACHINE)
    found = by_name(rows)
    assert list(found) == ["nearlight", "torch", "compile", "copy"]
    ours, plain = found["nearlight"], found["torch"]
    limit_us = 1920 / (H200.memory_gbps * 1e9) * 1e6
    assert ours["limit_us"] == pytest.approx(limit_us)
    assert ours["share"] == pytest.approx(limit_us / ours["time_us"])
    assert ours["of_copy"] == pytest.approx(found["copy"]["time_us"] / ours["time_us"])
    # A copy computes nothing, so that no limit of the op is its own.
    assert found["copy"].keys().isdisjoint({"limit_us", "share"})
    assert found["copy"]["of_copy"] == 1.0 and found["copy"]["ratio"] > 0
    assert all(row["clock_mhz"] is None for row in found.values())  # unknown on a CPU
    assert plain["ratio"] > 0
    assert plain["nearlight_is"] in ("faster", "slower", "no difference")
    assert ours["check"] == "held to float64 reference"
    host = [row for row in rows if row["case"] == "host cost, 6x40"]
    assert len(host) == 6
    assert all(row["host_us"] > 0 for row in host)


def test_without_a_gradient_the_forward_alone_is_timed():
    def inputs(case, device, generator):
        return {"x": make_inputs(case, device, generator)["x"].detach()}

    rows = measure(dataclasses.replace(op_with(), make_inputs=inputs), MACHINE)
    assert {row["direction"] for row in rows} == {"forward"}
    assert by_name(rows)["nearlight"]["time_us"] > 0


def test_a_wrong_op_gets_no_speed_and_its_peers_do():
    rows = by_name(measure(op_with(lambda x: 2.01 * x), MACHINE), "forward_backward")
    assert "time_us" not in rows["nearlight"]
    assert rows["nearlight"]["check"].startswith("wrong: output: ")
    assert rows["torch"]["time_us"] > 0


def test_an_op_that_turns_wrong_while_it_is_timed_gets_no_speed():
    calls = []

    def tires(x):
        calls.append(1)
        return (2 if len(calls) < 5 else 3) * x

    rows = by_name(measure(op_with(tires), MACHINE, directions=["forward"]))
    assert rows["nearlight"]["check"].startswith("wrong after the timing: output: ")
    assert "time_us" not in rows["nearlight"]


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_work_that_is_skipped_for_pointers_seen_before_gets_no_speed(direction):
    calls, kept = {}, {}

    def caches(x):
        place = x.data_ptr()
        calls[place] = calls.get(place, 0) + 1
        if calls[place] == 3:  # the checks before the timing call with each input once
            kept[place] = (2 * x).detach()
        return kept[place] + 0 * x if place in kept else 2 * x

    rows = by_name(measure(op_with(caches), MACHINE, directions=[direction]), direction)
    assert rows["nearlight"]["check"].startswith("wrong after the timing: ")
    assert "time_us" not in rows["nearlight"]
    assert rows["torch"]["time_us"] > 0


def test_a_gradient_kept_from_the_timing_is_found_by_another_upstream_gradient():
    kept = {}

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            num_calls, first = kept.get(g.data_ptr(), (0, 2 * g))
            kept[g.data_ptr()] = (num_calls + 1, first)
            return first if num_calls > 2 else 2 * g

    both = "forward_backward"
    rows = by_name(measure(op_with(Keeps.apply), MACHINE, directions=[both]), both)
    assert rows["nearlight"]["check"].startswith("wrong after the timing: gradient of x: ")


def test_a_wrong_peer_keeps_its_time_and_says_so():
    rows = by_name(measure(op_with(liger=lambda: lambda x: 3 * x), MACHINE))
    assert rows["liger"]["check"].startswith("wrong: output: ")
    assert rows["liger"]["time_us"] > 0


def test_missing_and_failing_peers_are_rows():
    def fails(x):
        raise RuntimeError("n = 131072 exceeds the recommended")

    rows = by_name(measure(op_with(liger=absent_peer, other=lambda: fails), MACHINE, ["other"]))
    assert rows["liger"]["check"] == "not installed: No module named 'absent'"
    assert rows["other"]["check"].startswith("raised RuntimeError: n = 131072")
    assert "time_us" not in rows["liger"] and "time_us" not in rows["other"]


def test_a_peer_that_writes_into_its_inputs_disturbs_nobody():
    def in_place(x):
        with torch.no_grad():
            x.mul_(0)
        return 2 * x

    rows = by_name(measure(op_with(liger=lambda: in_place), MACHINE))
    assert rows["nearlight"]["check"] == "held to float64 reference"
    assert rows["torch"]["check"] == "held to float64 reference"


def test_a_forced_backend_reaches_the_op():
    seen = []

    def function(x):
        seen.append(backend.use_triton("auto", x))
        return 2 * x

    with backend.force("triton"):
        measure(op_with(function), MACHINE, directions=["forward"])
    assert seen and all(seen)


def test_what_was_granted_is_said_beside_the_speed(monkeypatch: pytest.MonkeyPatch):
    def differs(op, function, case, machine, expected, is_backward, num_draws):
        compare._leniency.get().num_excused += num_draws
        return ""

    monkeypatch.setattr(bench_module, "differs_before", differs)
    rows = by_name(measure(op_with(), MACHINE, directions=["forward"]))
    held = "held to float64 reference"
    entries = f"{NUM_DRAWS} entries held to the terms that cancel there"
    assert rows["nearlight"]["check"] == f"{held}; {entries}"
    assert rows["torch"]["check"] == held


def test_a_flushed_time_below_the_limit_is_refused():
    def timed(us: float, method: str) -> timing.Timing:
        return timing.Timing(us, us, us, (us, us), method)

    times = {"nearlight": timed(5.0, "events"), "copy": timed(12.0, "events")}
    refused = bench_module._figures("nearlight", times, limit_us=10.0)
    assert list(refused) == ["check"]
    assert "below the limit of 10.0 µs" in refused["check"]
    times["nearlight"] = timed(5.0, "cpu clock")  # the limit is a GPU's
    assert bench_module._figures("nearlight", times, limit_us=10.0)["share"] == 2.0
    times["nearlight"] = dataclasses.replace(times["nearlight"], clock_mhz=(1980, 1965))
    assert bench_module._figures("nearlight", times, 10.0)["clock_mhz"] == (1980, 1965)


def test_a_row_in_place_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_module, "_extra_bytes", lambda work, machine: (0, True))
    rows = by_name(measure(op_with(), MACHINE, directions=["forward"]))
    assert rows["torch"]["check"] == "held to float64 reference; in place"
    assert rows["torch"]["extra_bytes"] == 0


def test_extra_bytes_above_the_declared_are_said():
    row = {"check": "held to float64 reference", "extra_bytes": 4096}
    bench_module._hold_to_declared(row, 1024)
    assert row["declared_bytes"] == 1024
    assert row["check"].endswith("more extra bytes than declared")


def test_bad_input_is_refused_with_what_is_allowed():
    with pytest.raises(BadInput, match="no peer 'quak'; it has liger, compile"):
        measure(op_with(liger=absent_peer), MACHINE, peers=["quak"])
    with pytest.raises(BadInput, match="allowed are forward, forward_backward"):
        measure(op_with(), MACHINE, directions=["backward"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(MissingPart, match="bench measures a GPU"):
        bench(op_with())

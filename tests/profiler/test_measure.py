from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nearlight.profiler.capture import trace
from nearlight.profiler.kernel_events import MODULE_RANGE, KernelTimes, kernel_times
from nearlight.profiler.measure import (
    Step,
    measured_rows,
    module_ranges,
    owners_of_peak,
    unmodelled_us,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures on a GPU")


def test_measured_times_meet_the_costs_of_recorded_calls(make_target, h200):
    calls = trace(make_target()).calls
    key = ("aten::mm", "layers.0.up")
    costs = [c.cost for c in calls if (c.name, c.place.module) == key]
    times = KernelTimes({key: 60.0, ("somebody::op", ""): 20.0}, 4, 100.0, 0.6)
    rows = {row.name: row for row in measured_rows(calls, times, 0.25, h200, 4.4)}
    assert rows["aten::mm"].calls == len(costs)
    assert rows["aten::mm"].time_ms == pytest.approx(0.06)
    assert rows["aten::mm"].flops == sum(cost.total_flops for cost in costs)
    # An op without a recorded cost is listed without a judgement.
    assert (rows["somebody::op"].limit_ms, rows["somebody::op"].share) == (0.0, None)
    assert rows["unattributed"].time_ms == pytest.approx(0.02)
    assert rows["idle"].time_ms == pytest.approx(0.15)
    assert sum(row.time_ms for row in rows.values()) == pytest.approx(0.25)


def test_time_without_a_cost_model_is_summed(make_target):
    calls = trace(make_target()).calls
    guessed = replace(calls[0], name="somebody::op", is_modelled=False)
    known = next(c for c in calls if c.name == "aten::mm")
    times = KernelTimes(
        {
            (known.name, known.place.module): 60.0,
            (guessed.name, guessed.place.module): 20.0,
            ("never::recorded", ""): 3.0,
        }
    )
    assert unmodelled_us((*calls, guessed), times) == 23.0


def test_a_busy_gpu_has_no_idle_row(make_target, h200):
    times = KernelTimes({("aten::mm", ""): 100.0}, 1, 100.0, 0.0)
    rows = measured_rows(trace(make_target()).calls, times, 0.09, h200, 4.4)
    assert [row.name for row in rows] == ["aten::mm"]


def test_owners_add_up_to_the_measured_peak(make_target):
    timeline = trace(make_target()).timeline
    tracked = timeline.peak().num_bytes
    owners = owners_of_peak(timeline, tracked + 1000)
    assert sum(owners.values()) == tracked + 1000
    assert owners["temporaries"] == timeline.by_owner(timeline.peak())["temporaries"] + 1000


def test_modules_of_a_really_profiled_step(make_target):
    """Forward and backward ops of torch's profiler find their modules; kernels are put in."""
    target = make_target()
    model, batch = target.make_model(), target.make_batch()
    with module_ranges(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        target.loss(model, batch).backward()
    events = profiler.events()
    products = [e for e in events if e.name in ("aten::mm", "aten::addmm")]
    for event in products:
        event.append_kernel("gemm", 0, 10.0)
    times = kernel_times(events, {"aten::mm", "aten::addmm"})
    expected = {}
    for layer in (0, 1):
        for part in ("up", "down"):
            expected["aten::addmm", f"layers.{layer}.{part}"] = 10.0
            expected["aten::mm", f"layers.{layer}.{part}"] = 20.0
    assert times.time_us == expected
    assert times.attributed_share == 1.0 and times.num_kernels == len(products)


def test_ranges_are_closed_and_hooks_gone_after_an_exception():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("planned")

    hooks = nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    model = nn.Sequential(Fails())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match="planned"), module_ranges(model):
            model(torch.zeros(1))
        torch.zeros(1) + 1
    after = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    assert after == before
    add = next(e for e in profiler.events() if e.name == "aten::add")
    assert add.cpu_parent is None
    assert {e.name for e in profiler.events()} >= {MODULE_RANGE + "0", MODULE_RANGE + "Sequential"}


def test_a_step_runs_and_forgets_its_state_when_released(make_target):
    target = make_target()
    model = target.make_model()
    step = Step(target, model, target.make_batch())
    before = [p.detach().clone() for p in model.parameters()]
    step.run()
    assert step.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    step.release()
    assert not step.optimizer.state and all(p.grad is None for p in model.parameters())
    assert Step(make_target(task="prefill"), model, target.make_batch()).optimizer is None


@needs_gpu
def test_a_measured_step_on_the_gpu(make_target):
    from nearlight.core.hardware import detect_gpu
    from nearlight.profiler.measure import measure_state
    from nearlight.profiler.predict import step_limit

    gpu, target = detect_gpu(), make_target()
    model = target.make_model().cuda()
    step = Step(target, model, target.make_batch("cuda"))
    traced = trace(target)
    state = measure_state(step, gpu, step_limit(traced, gpu), traced)
    assert state.mode == "measured" and state.step_ms > state.limit_ms
    assert sum(state.memory.values()) == state.peak_bytes
    assert state.figures["attributed_share"].value > 0.5
    assert {row.module for row in state.ops} >= {"layers.0.up", "layers.1.down"}

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nearlight.core.cost import Cost
from nearlight.profiler.attribution import Place
from nearlight.profiler.capture import Call, trace
from nearlight.profiler.kernel_events import MODULE_RANGE, KernelTimes, kernel_times
from nearlight.profiler.measure import (
    Step,
    _figures,
    join,
    measured_rows,
    module_ranges,
    owners_of_peak,
    unmodelled_us,
)
from nearlight.profiler.predict import predict_state

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures on a GPU")


def test_measured_times_meet_the_costs_of_recorded_calls(make_target, h200):
    calls = trace(make_target()).calls
    key = ("aten::mm", "layers.0.up")
    costs = [c.cost for c in calls if (c.name, c.place.module) == key]
    times = KernelTimes(
        {(*key, "forward"): 40.0, (*key, "backward"): 20.0, ("somebody::op", "", "forward"): 20.0},
        4,
        100.0,
        0.6,
    )
    rows = {row.name: row for row in measured_rows(calls, times, 0.25, h200, 4.4)}
    assert rows["aten::mm"].calls == len(costs)
    assert rows["aten::mm"].time_ms == pytest.approx(0.06)
    assert rows["aten::mm"].flops == sum(cost.total_flops for cost in costs)
    # An op without a recorded cost is listed without a judgement.
    for name in ("somebody::op", "unattributed"):
        assert (rows[name].limit_ms, rows[name].share) == (0.0, None)
        assert (rows[name].bound, rows[name].time_ms) == ("unmodelled", pytest.approx(0.02))
    assert rows["idle"].time_ms == pytest.approx(0.15)
    assert sum(row.time_ms for row in rows.values()) == pytest.approx(0.25)


def test_time_without_a_cost_model_is_summed(make_target):
    calls = trace(make_target()).calls
    guessed = replace(calls[0], name="somebody::op", is_modelled=False)
    known = next(c for c in calls if c.name == "aten::mm")
    times = KernelTimes(
        {
            (known.name, known.place.module, "backward"): 60.0,
            (guessed.name, guessed.place.module, "forward"): 20.0,
            ("never::recorded", "", "forward"): 3.0,
        }
    )
    assert unmodelled_us((*calls, guessed), times) == 23.0


def test_a_busy_gpu_has_no_idle_row(make_target, h200):
    times = KernelTimes({("aten::mm", "", "backward"): 100.0}, 1, 100.0, 0.0)
    rows = measured_rows(trace(make_target()).calls, times, 0.09, h200, 4.4)
    assert [row.name for row in rows] == ["aten::mm"]


def test_owners_add_up_to_the_measured_peak(make_target):
    timeline = trace(make_target()).timeline
    tracked = timeline.peak().num_bytes
    owners = owners_of_peak(timeline, tracked + 1000)
    assert sum(owners.values()) == tracked + 1000
    assert owners["temporaries"] == timeline.by_owner(timeline.peak())["temporaries"] + 1000


def ran(name, duration_us):
    """Return a kernel's event as the profiler of a GPU gives it."""
    place = SimpleNamespace(start=0.0, elapsed_us=lambda: duration_us)
    return SimpleNamespace(name=name, time_range=place, device_type=SimpleNamespace(name="CUDA"))


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
    kernels = [ran("gemm", 10.0) for _ in products]
    times = kernel_times([*events, *kernels], {"aten::mm", "aten::addmm"})
    expected = {}
    for layer in (0, 1):
        for part in ("up", "down"):
            expected["aten::addmm", f"layers.{layer}.{part}", "forward"] = 10.0
            expected["aten::mm", f"layers.{layer}.{part}", "backward"] = 20.0
    assert times.time_us == expected
    assert times.attributed_share == 1.0 and times.num_kernels == len(products)


def test_ranges_of_a_really_profiled_step_are_told_from_ops(make_target):
    target = make_target()
    step = Step(target, target.make_model(), target.make_batch())
    step.run()
    with module_ranges(step.model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        step.run()
    events = profiler.events()
    annotated = {event.name for event in events if event.is_user_annotation}
    assert annotated >= {"Optimizer.step#AdamW.step", MODULE_RANGE + "layers.0.norm"}
    assert not any(name.startswith("aten::") for name in annotated)
    (update,) = [event for event in events if event.name == "aten::_fused_adamw_"]
    update.append_kernel("adamw", 0, 8.6)
    update.append_kernel("Optimizer.step#AdamW.step", 0, 183.8)
    kernels = [ran("adamw", 8.6), ran("Optimizer.step#AdamW.step", 183.8)]
    times = kernel_times([*events, *kernels], {"aten::_fused_adamw_"})
    assert times.time_us == {("aten::_fused_adamw_", "", "optimizer"): 8.6}


def call_of(name, module, phase, num_bytes):
    cost = Cost(bytes_read=num_bytes)
    return Call(name, Place(module), phase, (), (), cost, True, False, False)


def test_gradients_summed_in_place_meet_the_sums_recorded_out_of_place(h200):
    """An RMSNorm of Llama-3.2-1B at 8 × 4096 in bf16, as an H200 ran it."""
    stream = 8 * 4096 * 2048 * 2
    calls = (
        call_of("aten::add", "norm", "forward", 8 * 4096 * 8),  # variance + eps
        call_of("aten::add", "norm", "backward", 3 * 2 * stream),  # fp32, inside the norm
        call_of("aten::add", "norm", "backward", 3 * stream),  # the residual's gradient
    )
    times = KernelTimes(
        {
            ("aten::add", "norm", "forward"): 1.7,
            ("aten::add_", "norm", "backward"): 276.6,
        },
        total_us=278.3,
    )
    (row,) = measured_rows(calls, times, 0.2, h200, 1.0)
    assert (row.name, row.calls, row.bound) == ("aten::add", 3, "memory")
    assert row.time_ms == pytest.approx(0.2783)
    assert row.limit_ms == pytest.approx(9 * stream / 4.8e12 * 1e3)
    assert row.share == pytest.approx(0.904, abs=1e-3) and row.remark == ""
    assert unmodelled_us(calls, times) == 0.0


def test_times_of_another_module_meet_the_calls_of_their_phase_that_are_left():
    tied = call_of("aten::add", "lm_head", "backward", 2**30)
    forward = call_of("aten::add", "layers.0", "forward", 2**20)
    times = {
        ("aten::add_", "embed", "backward"): 300.0,
        ("aten::add", "layers.0", "forward"): 5.0,
        ("aten::mul", "embed", "backward"): 7.0,
    }
    met = {(one.name, one.module): one for one in join((tied, forward), KernelTimes(times))}
    assert met["aten::add", "embed"].calls == (tied,)
    assert met["aten::add", "layers.0"].calls == (forward,)
    assert met["aten::mul", "embed"].calls == ()  # another op
    times["aten::add_", "embed_again", "backward"] = 100.0
    met = {(one.name, one.module): one for one in join((tied, forward), KernelTimes(times))}
    assert met["aten::add", ""].time_us == 400.0  # which call ran where is not known
    # In another phase there is nothing to join.
    other = join((tied,), KernelTimes({("aten::add", "embed", "forward"): 1.0}))
    assert [(one.module, one.calls) for one in other] == [("embed", ())]


def test_kernels_that_no_op_claims_are_said_in_the_source(make_target, h200):
    state = predict_state(trace(make_target()), h200)
    sources = [
        _figures(state, 0.0, KernelTimes(num_kernels=5, num_on_device=num), 0.0)["kernel_ms"].source
        for num in (5, 6)
    ]
    assert sources[0].endswith("one step, 5 kernels")
    assert sources[1].endswith("5 kernels given to ops of 6 on the device")


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

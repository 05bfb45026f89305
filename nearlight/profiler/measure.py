"""Measure a step on the GPU of this machine: time, memory by owner, and device time by op."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from nearlight.core.cost import Cost
from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Figure, OpRow, State
from nearlight.profiler import verdicts
from nearlight.profiler.attribution import module_names
from nearlight.profiler.capture import Call, Trace, record_step, run_step
from nearlight.profiler.kernel_events import MODULE_RANGE, KernelTimes, kernel_times, same_op
from nearlight.profiler.memory import Timeline, describe
from nearlight.profiler.optimizers import make_optimizer
from nearlight.profiler.predict import PEAK_TENSORS
from nearlight.profiler.target import Batch, Target

WARMUP_STEPS = 3
MEASURED_STEPS = 7


class Step:
    """A training step or forward pass that runs again and again on the current CUDA device."""

    def __init__(
        self, target: Target, model: nn.Module, batch: Batch, optimizer: str = "adamw-fused"
    ) -> None:
        self.target, self.model, self.batch = target, model, batch
        self._optimizer_name = optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self.spread_ms = 0.0
        """Largest minus smallest step time of the last block."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, with the state of earlier steps; None where nothing is trained."""
        if self._optimizer is None and self.target.task == "train":
            self._optimizer = make_optimizer(self._optimizer_name, self.model.parameters())
        return self._optimizer

    def run(self) -> None:
        """Run one step; it returns when the host has issued it."""
        run_step(self.target, self.model, self.batch, self.optimizer)

    def block(self, steps: int, warmup: int = WARMUP_STEPS) -> tuple[float, int]:
        """Run `steps` steps after a warm-up; return the median in ms and the peak in bytes."""
        for _ in range(warmup):
            self.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times_ms = []
        for _ in range(steps):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            self.run()
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
        self.spread_ms = max(times_ms) - min(times_ms)
        return median(times_ms), torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Drop gradients and optimizer state, for example after running out of memory."""
        self._optimizer = None
        self.model.zero_grad(set_to_none=True)
        gc.collect()


def measure_state(step: Step, gpu: Gpu, limit_s: float, trace: Trace) -> State:
    """Measure a step: first undisturbed, then recorded, then profiled.

    Args:
        step: of the program as it stands, on the current CUDA device.
        gpu: the table's row of this device.
        limit_s: limit of the step, from the program as found.
        trace: of the program as found; tells the tokens and samples of a step.

    Returns:
        a State of mode "measured". Times of ops are those of the profiled step; what no op
        claims and what the GPU idled are rows of their own.

    Raises:
        torch.cuda.OutOfMemoryError: the step does not fit.
    """
    step_ms, peak_bytes = step.block(MEASURED_STEPS)
    calls, timeline = record_step(step.target, step.model, step.batch, step.optimizer)
    times = _profile(step, {call.name for call in calls})
    floor_us = ceilings(gpu).kernel_floor_us
    rows = measured_rows(calls, times, step_ms, gpu, floor_us)
    memory = owners_of_peak(timeline, peak_bytes)
    tokens, step_s = trace.num_tokens, step_ms / 1e3
    state = State(
        mode="measured",
        step_ms=step_ms,
        tokens_per_s=None if tokens is None else tokens / step_s,
        samples_per_s=trace.num_samples / step_s,
        peak_bytes=peak_bytes,
        limit_ms=limit_s * 1e3,
        share=limit_s / step_s,
        ops=rows,
        memory=memory,
        peak_tensors=tuple(describe(timeline.alive(timeline.peak().event), PEAK_TENSORS)),
        pipe=verdicts.main_pipe(call.cost for call in calls),
    )
    return replace(
        state, figures=_figures(state, step.spread_ms, times, unmodelled_us(calls, times))
    )


@dataclass(frozen=True)
class Joined:
    """Device time of an op in a module, and the recorded calls that it is the time of."""

    name: str
    module: str
    calls: tuple[Call, ...]
    time_us: float


def join(calls: Sequence[Call], times: KernelTimes) -> list[Joined]:
    """Join profiled times with recorded calls, by op and module; pure.

    In-place and plain variants of an op are one. Times that meet no call in their module are
    joined with the calls of the op and phase that met no time; what is left has no calls.
    """
    recorded: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        recorded.setdefault((same_op(call.name), call.place.module), []).append(call)
    met: dict[tuple[str, str], float] = {}
    left: dict[tuple[str, str], list[Joined]] = {}
    for (name, module, phase), time_us in times.time_us.items():
        key = (same_op(name), module)
        if key in recorded:
            met[key] = met.get(key, 0.0) + time_us
        else:
            left.setdefault((same_op(name), phase), []).append(Joined(name, module, (), time_us))
    joined = [
        Joined(recorded[key][0].name, key[1], tuple(recorded[key]), time_us)
        for key, time_us in met.items()
    ]
    for (op, phase), group in left.items():
        untimed = [
            call
            for key, found in recorded.items()
            if key[0] == op and key not in met
            for call in found
            if call.phase == phase
        ]
        joined += [_as_one(group, untimed)] if untimed else group
    return joined


def _as_one(group: Sequence[Joined], calls: Sequence[Call]) -> Joined:
    """Return times of several modules as one row; it names their module where it is one."""
    modules = {part.module for part in group}
    module = modules.pop() if len(modules) == 1 else ""
    return Joined(calls[0].name, module, tuple(calls), sum(part.time_us for part in group))


def measured_rows(
    calls: tuple[Call, ...], times: KernelTimes, step_ms: float, gpu: Gpu, kernel_floor_us: float
) -> tuple[OpRow, ...]:
    """Join measured device times with the costs of the recorded calls; pure.

    Args:
        calls: of one recorded step.
        times: device time by op, module and phase of one profiled step.
        step_ms: time of an undisturbed step; what kernels do not fill of it is idle.
        gpu: whose limits count.
        kernel_floor_us: device time of a kernel that does nothing.
    """
    timed: list[tuple[str, str, Cost | None, float]] = []
    for one in join(calls, times):
        costs: list[Cost | None] = [call.cost for call in one.calls]
        costs = costs or [None]
        timed += [(one.name, one.module, c, one.time_us * 1e-6 / len(costs)) for c in costs]
    if times.unattributed_us:
        timed.append(("unattributed", "", None, times.unattributed_us * 1e-6))
    rows = verdicts.op_rows(timed, gpu, kernel_floor_us)
    idle_s = step_ms / 1e3 - times.total_us * 1e-6
    if idle_s > 0:
        rows.append(verdicts.idle_row(idle_s))
    return tuple(sorted(rows, key=lambda row: -row.time_ms))


def unmodelled_us(calls: tuple[Call, ...], times: KernelTimes) -> float:
    """Return the device time of ops without a cost model, or that the recorded step lacks; pure."""
    return sum(
        one.time_us
        for one in join(calls, times)
        if not one.calls or not all(call.is_modelled for call in one.calls)
    )


def owners_of_peak(timeline: Timeline, peak_bytes: int) -> dict[str, int]:
    """Return bytes by owner; what the allocator holds beyond known tensors is temporary."""
    peak = timeline.peak()
    memory = timeline.by_owner(peak)
    memory["temporaries"] += peak_bytes - peak.num_bytes
    return memory


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Open a profiler range around the forward of every module while the block lasts."""
    names = module_names(model)
    open_ranges: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        opened = record_function(MODULE_RANGE + names.get(id(module), type(module).__name__))
        opened.__enter__()
        open_ranges.append(opened)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        hooks = nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ):
            stack.callback(handle.remove)
        yield


def _profile(step: Step, known_ops: set[str]) -> KernelTimes:
    with module_ranges(step.model):
        step.run()  # the ranges' own first-time costs
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step.run()
            torch.cuda.synchronize()
    return kernel_times(profiler.events(), known_ops)


def _figures(
    state: State, spread_ms: float, times: KernelTimes, without_model_us: float
) -> dict[str, Figure]:
    source = f"CUDA events, median of {MEASURED_STEPS} steps after {WARMUP_STEPS}"
    half = spread_ms / 2
    profiled = f"torch.profiler, one step, {times.num_kernels} kernels"
    if times.num_kernels != times.num_on_device:
        profiled += f" given to ops of {times.num_on_device} on the device"
    figures = {
        "step_ms": Figure(
            state.step_ms, "ms", "measured", source, state.step_ms - half, state.step_ms + half
        ),
        "peak_bytes": Figure(
            state.peak_bytes, "bytes", "measured", "torch.cuda.max_memory_allocated"
        ),
        "limit_ms": Figure(state.limit_ms, "ms", "derived", "flops and bytes over datasheet peaks"),
        "share": Figure(state.share, "", "derived", "limit_ms ÷ step_ms"),
        "unmodelled_ms": Figure(without_model_us / 1e3, "ms", "measured", profiled),
        "kernel_ms": Figure(times.total_us / 1e3, "ms", "measured", profiled),
        "attributed_share": Figure(times.attributed_share, "", "measured", profiled),
    }
    if state.tokens_per_s is not None:
        figures["tokens_per_s"] = Figure(state.tokens_per_s, "tokens/s", "measured", source)
    if state.samples_per_s is not None:
        figures["samples_per_s"] = Figure(state.samples_per_s, "samples/s", "measured", source)
    return figures

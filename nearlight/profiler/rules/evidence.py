"""What every rule needs: times of matched calls, of a fused form, and memory without tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from nearlight.core.cost import Cost
from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State, gib
from nearlight.profiler.capture import Call, TensorMeta, Trace
from nearlight.profiler.kernel_events import same_op
from nearlight.profiler.memory import Storage
from nearlight.profiler.predict import predict_call_s

# A finding below this share of the step's time and of its peak memory is noise: equal machines
# differ by 3% (docs/log.md), and a page of thousandths helps nobody.
SMALLEST_GAIN = 0.001


@dataclass(frozen=True)
class Evidence:
    """A traced step, its state, and the questions rules ask of them."""

    trace: Trace
    state: State
    gpu: Gpu

    @cached_property
    def _times_ms(self) -> dict[int, float]:
        """Time of each call, by identity: its row's time, split by predicted time."""
        reached = ceilings(self.gpu)
        predicted = [predict_call_s(call, reached, self.gpu) * 1e3 for call in self.trace.calls]
        rows: dict[tuple[str, str], float] = {}
        for row in self.state.ops:
            key = (same_op(row.name), row.module)
            rows[key] = rows.get(key, 0.0) + row.time_ms
        sums: dict[tuple[str, str], float] = {}
        for call, time_ms in zip(self.trace.calls, predicted, strict=True):
            key = (same_op(call.name), call.place.module)
            sums[key] = sums.get(key, 0.0) + time_ms
        return {
            id(call): time_ms * rows.get(key, sums[key]) / sums[key] if sums[key] else 0.0
            for call, time_ms in zip(self.trace.calls, predicted, strict=True)
            for key in [(same_op(call.name), call.place.module)]
        }

    def calls(self, matches: Callable[[Call], bool]) -> list[Call]:
        """Return the calls of the step that match."""
        return [call for call in self.trace.calls if matches(call)]

    def time_ms(self, calls: Sequence[Call]) -> float:
        """Return the time of some calls."""
        return sum(self._times_ms[id(call)] for call in calls)

    def stream_ms(self, num_bytes: int, num_kernels: int) -> float:
        """Return the time that kernels at the copy ceiling need for some bytes."""
        each = Cost(bytes_read=num_bytes // max(num_kernels, 1))
        return ceilings(self.gpu).predict_s(each) * 1e3 * num_kernels

    def gain_ms(self, calls: Sequence[Call], fused_ms: float = 0.0, fused_ops: int = 0) -> float:
        """Return how much shorter a step is when something fused takes the place of some calls.

        Where the host is the slower side, only the ops it no longer has to issue count.

        Args:
            calls: that vanish.
            fused_ms: device time of what takes their place.
            fused_ops: how many ops that is.
        """
        idle_ms = sum(row.time_ms for row in self.state.ops if row.bound == "idle")
        host_us = ceilings(self.gpu).host_us_per_op
        host_ms = self.state.step_ms if idle_ms else self.trace.num_host_ops * host_us / 1e3
        on_gpu_ms = self.state.step_ms - idle_ms - self.time_ms(calls) + fused_ms
        on_host_ms = host_ms - (len(calls) - fused_ops) * host_us / 1e3
        return self.state.step_ms - max(on_gpu_ms, on_host_ms)

    def saved_bytes(self, vanishes: Callable[[Storage], bool]) -> int:
        """Return how far the peak falls when some tensors no longer exist."""
        timeline = self.trace.timeline
        return timeline.peak().num_bytes - timeline.peak(without=vanishes).num_bytes

    def share(self, time_ms: float) -> str:
        """Return a time as a share of the step."""
        return f"{time_ms / self.state.step_ms:.1%} of the step"

    def finding(
        self,
        title: str,
        evidence: str,
        cause: str,
        fix: str,
        gain_ms: float,
        gain_bytes: int = 0,
        next_step: str = "",
    ) -> Finding | None:
        """Return a finding, or None where it would change next to nothing."""
        is_small = (
            gain_ms < SMALLEST_GAIN * self.state.step_ms
            and gain_bytes < SMALLEST_GAIN * self.state.peak_bytes
        )
        if is_small:
            return None
        next_step = next_step or f"nearlight optimize applies {fix} and proves it"
        return Finding(
            title, evidence, cause, fix, gain_ms, max(gain_bytes, 0), next_step=next_step
        )


def meta_bytes(meta: TensorMeta) -> int:
    """Return the size of a tensor."""
    return prod(meta.shape) * meta.dtype.itemsize


def largest_bytes(metas: Sequence[TensorMeta]) -> int:
    """Return the size of the largest of some tensors."""
    return max(map(meta_bytes, metas), default=0)


def by_module(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Group calls by the module that made them."""
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.place.module, []).append(call)
    return groups


def is_stream(call: Call) -> bool:
    """Return whether a call is one of torch's own, and no matrix product or attention."""
    return call.name.startswith("aten::") and call.cost.pattern == "stream"


def describe_calls(calls: Sequence[Call], time_ms: float) -> str:
    """Return "64 calls, 12.3 ms, 45.6 GiB moved"."""
    moved = sum(call.cost.bytes for call in calls)
    return f"{len(calls)} calls, {time_ms:.2f} ms, {gib(moved)} moved"


def matching(pattern: str) -> Callable[[str], bool]:
    """Return a case-sensitive search for a pattern."""
    found = re.compile(pattern).search
    return lambda text: found(text) is not None

"""The one timer: warm, flushed, rotated, interleaved; on a GPU by events on a full stream.

Device time and host time are different things and are never mixed: `compare` measures the
device (the stream is held back while the host enqueues), `host_cost_us` measures the CPU.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nearlight.core.errors import BadInput

Call = Callable[[], Any]
Verdict = Literal["faster", "slower", "no difference"]

WARMUP_CALLS = 3
# What the host needs for the events around a call, first uses of them included.
HOLD_AT_LEAST_US = 30.0
# Differences smaller than this are never called one: clocks alone move by as much.
SMALLEST_DIFFERENCE = 0.01
CONFIDENCE = 0.99
BOOTSTRAP_DRAWS = 1000


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        median_us: median of the samples.
        low_us: 20th percentile.
        high_us: 80th percentile.
        samples_us: every sample, in the order taken; samples of functions that were compared
            belong together by index.
        method: "events" or "cpu clock".
        clock_mhz: SM clock before and after, None where it cannot be read.
    """

    median_us: float
    low_us: float
    high_us: float
    samples_us: tuple[float, ...]
    method: str
    clock_mhz: tuple[int, int] | None = None

    @property
    def spread(self) -> float:
        """Width from the 20th to the 80th percentile over the median."""
        return (self.high_us - self.low_us) / self.median_us


def compare(
    functions: Mapping[str, Call | Sequence[Call]],
    *,
    device: str = "cuda",
    flush_bytes: int | None = None,
    min_repeats: int = 20,
    max_seconds: float = 2.0,
) -> dict[str, Timing]:
    """Time several functions interleaved, so that drift of the clocks hits all alike.

    Args:
        functions: name to a call, or to several calls of the same work on fresh inputs, which
            are rotated.
        device: "cuda", or "cpu" for work on CPU tensors.
        flush_bytes: bytes overwritten before each sample, so that caches are cold; twice the
            GPU's L2 by default, 0 for warm caches.
        min_repeats: samples of each function at least.
        max_seconds: when this much time is spent, no samples beyond `min_repeats` are taken.

    Returns:
        The timings by name.

    Raises:
        RuntimeError: `device="cuda"` without a GPU.
        BadInput: a call enqueues nothing that can be timed.
    """
    calls = {name: _as_calls(function) for name, function in functions.items()}
    clock: _CudaClock | _CpuClock
    clock = _CudaClock(flush_bytes) if device == "cuda" else _CpuClock(flush_bytes)
    samplers = {name: clock.sampler(each) for name, each in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    before = clock.clock_mhz()
    order, start, rounds = list(calls), time.perf_counter(), 0
    shuffle = random.Random(0).shuffle
    while rounds < min_repeats or (
        time.perf_counter() - start < max_seconds and rounds < 10 * min_repeats
    ):
        shuffle(order)
        for name in order:
            samples[name].append(samplers[name](rounds))
        rounds += 1
    after = clock.clock_mhz()
    clocks = (before, after) if before is not None and after is not None else None
    return {name: _summary(name, taken, clock.method, clocks) for name, taken in samples.items()}


def time_call(function: Call | Sequence[Call], **options: Any) -> Timing:
    """Time one function; options as for `compare`."""
    return compare({"it": function}, **options)["it"]


def difference(a: Timing, b: Timing) -> tuple[Verdict, float]:
    """Say whether `a` is faster or slower than `b`, and the ratio of a's time to b's.

    Samples taken in the same round are paired; the interval of the median ratio comes from a
    seeded bootstrap. Inside the interval, or below one per cent, there is no difference.
    """
    pairs = zip(a.samples_us, b.samples_us, strict=False)
    # What an empty pair of events takes, taken off, leaves now and then nothing to divide by.
    ratios = [x / y for x, y in pairs if min(x, y) > 0]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_DRAWS)
    )
    tail = int((1 - CONFIDENCE) / 2 * BOOTSTRAP_DRAWS)
    low, high, ratio = medians[tail], medians[-1 - tail], statistics.median(ratios)
    if low <= 1.0 <= high or abs(ratio - 1.0) < SMALLEST_DIFFERENCE:
        return "no difference", ratio
    return ("faster" if ratio < 1.0 else "slower"), ratio


def host_cost_us(function: Call, calls: int = 200) -> float:
    """Return the microseconds of CPU time that one call costs its caller (median of blocks).

    The device must not be the bottleneck: call it with small tensors.
    """
    on_gpu = torch.cuda.is_available()
    for _ in range(WARMUP_CALLS):
        function()
    blocks = []
    for _ in range(10):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls // 10):
            function()
        blocks.append((time.perf_counter_ns() - start) / 1e3 / (calls // 10))
    if on_gpu:
        torch.cuda.synchronize()
    return statistics.median(blocks)


def _as_calls(function: Call | Sequence[Call]) -> list[Call]:
    return list(function) if isinstance(function, Sequence) else [function]


def _summary(
    name: str, samples: Sequence[float], method: str, clocks: tuple[int, int] | None
) -> Timing:
    ranked = sorted(samples)
    low_us = ranked[len(ranked) // 5]
    if low_us <= 0:
        reason = f"a fifth of its samples are {low_us:.1f} µs or less; time one that launches work"
        raise BadInput(f"{name}: the call enqueues nothing that can be timed: {reason}")
    return Timing(
        median_us=statistics.median(ranked),
        low_us=low_us,
        high_us=ranked[-1 - len(ranked) // 5],
        samples_us=tuple(samples),
        method=method,
        clock_mhz=clocks,
    )


class _CpuClock:
    """Times calls on the CPU; the flush overwrites a buffer larger than common caches."""

    method = "cpu clock"

    def __init__(self, flush_bytes: int | None) -> None:
        size = 64 << 20 if flush_bytes is None else flush_bytes
        self._buffer = torch.empty(size, dtype=torch.uint8) if size else None

    def sampler(self, calls: list[Call]) -> Callable[[int], float]:
        for call in calls:
            call()

        def sample(index: int) -> float:
            if self._buffer is not None:
                self._buffer.fill_(index % 251)
            call = calls[index % len(calls)]
            start = time.perf_counter_ns()
            call()
            return (time.perf_counter_ns() - start) / 1e3

        return sample

    def clock_mhz(self) -> int | None:
        return None


class _CudaClock:
    """Times calls on the current CUDA stream, which is held back while the host enqueues them.

    What an empty pair of events takes is taken off: short kernels come out as Nsight Compute has
    them. Replayed in a graph they overlap and seem 1.1 µs shorter.
    """

    method = "events"

    def __init__(self, flush_bytes: int | None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("timing on a GPU needs one; pass device='cpu' for CPU work")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = 2 * properties.L2_cache_size if flush_bytes is None else flush_bytes
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        # Cycles per microsecond of the spin kernel that holds the stream back.
        self._cycles_per_us = properties.clock_rate / 1e3

    def sampler(self, calls: list[Call]) -> Callable[[int], float]:
        for _ in range(WARMUP_CALLS):
            for call in calls:
                call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls[0]()
        host_us = (time.perf_counter() - start) * 1e6
        # Half as long again as the host needs to enqueue the call, so that no gap is timed.
        hold_us = HOLD_AT_LEAST_US + 1.5 * min(host_us, 20_000.0)

        def sample(index: int) -> float:
            empty, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            if self._buffer is not None:
                self._buffer.fill_(index % 251)
            torch.cuda._sleep(int(hold_us * self._cycles_per_us))
            empty.record()
            begin.record()
            calls[index % len(calls)]()
            end.record()
            end.synchronize()
            return 1e3 * (begin.elapsed_time(end) - empty.elapsed_time(begin))

        return sample

    def clock_mhz(self) -> int | None:
        import pynvml

        try:
            pynvml.nvmlInit()
            index = torch.cuda.current_device()
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return None

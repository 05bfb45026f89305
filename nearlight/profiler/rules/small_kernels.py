"""Kernels so short that starting them is most of their time."""

from __future__ import annotations

from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules.evidence import Evidence


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find calls whose launches take at least half of their time."""
    evidence = Evidence(trace, state, gpu)
    floor_ms = ceilings(gpu).kernel_floor_us / 1e3
    short = evidence.calls(lambda c: c.cost.num_kernels * floor_ms >= evidence.time_ms([c]) / 2)
    is_waiting = any(row.bound == "idle" for row in state.ops)
    if not short or is_waiting:
        return None  # while the host is the slower side, shorter kernels gain nothing
    kernels = sum(call.cost.num_kernels for call in short)
    launches_ms = min(kernels * floor_ms, evidence.time_ms(short))
    return evidence.finding(
        title=f"{kernels} kernels are mostly launch",
        evidence=f"{kernels} kernels of {len(short)} calls take {evidence.time_ms(short):.2f} ms, "
        f"{launches_ms:.2f} ms of it for starting kernels ({evidence.share(launches_ms)})",
        cause="each op is a kernel of its own over little data",
        fix="",
        gain_ms=launches_ms,
        next_step="torch.compile fuses neighbours into fewer kernels, those of torch's own ops: "
        "a fix of nearlight stays a kernel of its own",
    )

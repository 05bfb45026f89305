"""A GPU that waits for Python."""

from __future__ import annotations

from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules.evidence import Evidence


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find a step in which the GPU idles because ops are not issued fast enough."""
    idle_ms = sum(row.time_ms for row in state.ops if row.bound == "idle")
    evidence = Evidence(trace, state, gpu)
    host_us = ceilings(gpu).host_us_per_op
    return evidence.finding(
        title="the GPU waits for the host",
        evidence=f"idle {idle_ms:.2f} ms, {evidence.share(idle_ms)}: {trace.num_host_ops} ops at "
        f"about {host_us:.0f} µs of CPU time each, {len(trace.calls)} of them launch kernels",
        cause="eager PyTorch issues one op after another, and the kernels are shorter than that",
        fix="",
        gain_ms=idle_ms,
        next_step='a CUDA graph issues the step at once: torch.compile(mode="reduce-overhead"), '
        "or a larger batch",
    )

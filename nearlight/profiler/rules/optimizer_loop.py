"""An optimizer step made of many kernels."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules.evidence import Evidence, describe_calls


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find an optimizer that is not fused."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(lambda c: c.phase == "optimizer")
    if not calls or any(call.name.startswith("aten::_fused_") for call in calls):
        return None
    time_ms = evidence.time_ms(calls)
    # Parameters and state are read and written, gradients read.
    fewest = 2 * (trace.parameter_bytes + trace.optimizer_bytes) + trace.gradient_bytes
    kernels = sum(call.cost.num_kernels for call in calls)
    return evidence.finding(
        title="the optimizer is not fused",
        evidence=f"{describe_calls(calls, time_ms)} in {kernels} kernels, "
        f"{evidence.share(time_ms)}",
        cause="each operation of the update reads and writes parameters or state on its own",
        fix="",
        gain_ms=evidence.gain_ms(calls, evidence.stream_ms(fewest, 1), 1),
        next_step="pass fused=True to the optimizer",
    )

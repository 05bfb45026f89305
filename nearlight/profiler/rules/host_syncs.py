"""Numbers fetched from the GPU in the middle of a step."""

from __future__ import annotations

from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules.evidence import Evidence

_READ = "aten::_local_scalar_dense"
# After a wait the host has to fill the queue again; until then kernels run at the host's pace. How
# many ops that takes was estimated, not measured.
_OPS_UNTIL_AHEAD = 10


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find `.item()`, `if tensor:` and their like."""
    if trace.num_host_syncs == 0:
        return None
    evidence = Evidence(trace, state, gpu)
    lines = sorted({call.place.line for call in trace.calls if call.name == _READ})
    gain_ms = trace.num_host_syncs * _OPS_UNTIL_AHEAD * ceilings(gpu).host_us_per_op / 1e3
    return evidence.finding(
        title=f"the host waits for a number from the GPU, {trace.num_host_syncs} × a step",
        evidence=f"values are read at {', '.join(lines) or 'an unknown line'}",
        cause=".item(), bool() or a Python branch on a tensor empties the queue of kernels",
        fix="",
        gain_ms=gain_ms,
        next_step="keep the value on the GPU, or read it once after the step",
    )

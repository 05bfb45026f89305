"""Residual additions as passes of their own before every norm."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.rules.evidence import (
    Evidence,
    describe_calls,
    is_stream,
    largest_bytes,
    matching,
)

_is_block = matching(r"(Layer|Block)$")
_is_norm = matching(r"Norm")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find residual additions that the norm after them could do on its way."""
    evidence = Evidence(trace, state, gpu)
    forward = evidence.calls(lambda c: c.phase == "forward" and _adds(c))
    if not forward:
        return None
    # Autograd adds the two gradients that meet at a residual, right after the norm's backward.
    sums = {call.outputs[0] for call in forward}
    backward = evidence.calls(
        lambda c: c.phase == "backward" and _adds_gradients(c) and c.outputs[0] in sums
    )
    calls = forward + backward
    time_ms = evidence.time_ms(calls)
    # Fused, an addition still writes the sum but the norm no longer reads it, and back alike.
    kept = sum(call.cost.bytes - largest_bytes(call.outputs) for call in calls)
    sums_too = f"; {len(backward)} of them sum gradients" if backward else ""
    return evidence.finding(
        title=f"{len(forward)} residual additions run alone",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}{sums_too}",
        cause="the sum is written and at once read again by the norm that follows",
        fix="",
        gain_ms=evidence.gain_ms(calls, evidence.stream_ms(kept, len(calls)), len(calls)),
        next_step="no fix of nearlight takes this yet: torch.compile fuses the addition into a "
        "norm of plain PyTorch, but not into one that patch:rms_norm or patch:layer_norm replaced",
    )


def _adds(call: Call) -> bool:
    return is_stream(call) and call.name == "aten::add" and _is_block(call.place.module_class)


def _adds_gradients(call: Call) -> bool:
    return call.name == "aten::add" and _is_norm(call.place.module_class)

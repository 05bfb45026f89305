"""Rotary embedding as a chain of negations, concatenations, products and sums."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules.evidence import (
    Evidence,
    by_module,
    describe_calls,
    is_stream,
    largest_bytes,
    matching,
)

_is_rotation = matching(r"rotate_half|apply_rotary|apply_rope|rotate_every_two")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find q and k rotated by torch's element-wise kernels."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(lambda c: is_stream(c) and _is_rotation(c.place.function))
    sums = [call for call in calls if call.phase == "forward" and call.name == "aten::add"]
    if not sums:
        return None
    num_modules = len(by_module(sums))
    is_training = any(call.phase == "backward" for call in calls)
    # q and k are read and written once each way, both in one launch.
    size = sum(largest_bytes(call.outputs) for call in sums)
    directions = 1 + is_training
    time_ms = evidence.time_ms(calls)
    fused_kernels = num_modules * directions
    fused_ms = evidence.stream_ms(2 * size * directions, fused_kernels)
    return evidence.finding(
        title=f"rotary embedding of {num_modules} attentions in separate kernels",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}",
        cause="q and k are negated, concatenated, multiplied and added in passes of their own, "
        "over transposed tensors that the vectorised kernels cannot take",
        fix="patch:rope",
        gain_ms=evidence.gain_ms(calls, fused_ms, fused_kernels),
    )

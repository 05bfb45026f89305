"""Casts between dtypes that cost a pass each."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.rules.evidence import Evidence, by_module, describe_calls


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find casts between floating dtypes."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(_casts)
    if not calls:
        return None
    time_ms = evidence.time_ms(calls)
    slowest = max(by_module(calls).items(), key=lambda item: evidence.time_ms(item[1]))
    return evidence.finding(
        title=f"{len(calls)} casts between dtypes",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}; most in "
        f"{slowest[0] or 'the step itself'} ({evidence.time_ms(slowest[1]):.2f} ms)",
        cause="a cast reads and writes the whole tensor; a fused kernel converts in registers",
        fix="",
        gain_ms=evidence.gain_ms(calls),
        next_step="fused norms and losses take most of them away; keep the rest of the model in "
        "one dtype",
    )


def _casts(call: Call) -> bool:
    if call.name != "aten::_to_copy" or not call.inputs or call.phase == "optimizer":
        return False
    source, result = call.inputs[0].dtype, call.outputs[0].dtype
    return source.is_floating_point and result.is_floating_point and source != result

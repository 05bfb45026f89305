"""Normalisation as several passes over memory where one each way is enough."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.memory import Storage
from nearlight.profiler.rules.evidence import (
    Evidence,
    by_module,
    describe_calls,
    is_stream,
    largest_bytes,
    matching,
)

_is_norm = matching(r"(RMSNorm|RmsNorm|LayerNorm)\d*d?$")
_is_layer_norm = matching(r"(?<!RMS)(?<!Rms)LayerNorm$")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find RMSNorm or LayerNorm modules whose kernels move more than x, y and their gradients."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(lambda c: is_stream(c) and _is_norm(c.place.module_class))
    if not calls:
        return None
    modules = by_module(calls)
    fused_bytes = fused_kernels = kept_bytes = 0
    for group in modules.values():
        size = _row_bytes(group)
        directions = {call.phase for call in group}
        # Forward: x in, y out. Backward: x and the gradient in, the gradient out.
        fused_bytes += size * (2 * ("forward" in directions) + 3 * ("backward" in directions))
        # The fused backward reads x itself, which a norm that works on an fp32 copy lets go.
        if "backward" in directions and any(call.name == "aten::_to_copy" for call in group):
            kept_bytes += size
        fused_kernels += ("forward" in directions) + 2 * ("backward" in directions)
    time_ms = evidence.time_ms(calls)
    fused_ms = evidence.stream_ms(fused_bytes, fused_kernels)
    classes = sorted({call.place.module_class for call in calls})
    op = "layer_norm" if _is_torch_layer_norm(calls) else "rms_norm"
    return evidence.finding(
        title=f"{len(modules)} × {', '.join(classes)} in separate kernels",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}",
        cause="each cast, square, mean and product reads and writes the whole tensor, and fp32 "
        "copies are kept for the backward pass",
        fix=f"patch:{op}",
        gain_ms=evidence.gain_ms(calls, fused_ms, fused_kernels),
        gain_bytes=evidence.saved_bytes(_vanishes) - kept_bytes,
    )


def _row_bytes(group: list[Call]) -> int:
    """Return the size of the module's input, as its first kernel reads it."""
    first = group[0]
    return largest_bytes(first.inputs)


def _is_torch_layer_norm(calls: list[Call]) -> bool:
    return all(
        _is_layer_norm(call.place.module_class) or "layer_norm" in call.name for call in calls
    )


def _vanishes(storage: Storage) -> bool:
    return (
        storage.phase == "forward"
        and _is_norm(storage.place.module_class)
        and not storage.is_module_output
        and storage.op.startswith("aten::")
        and not storage.op.startswith(("aten::native_", "aten::_fused"))
    )

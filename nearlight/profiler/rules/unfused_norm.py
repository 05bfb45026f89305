"""Normalisation that takes longer than one pass over memory each way."""

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
_is_fused = matching(r"^aten::(native_layer_norm|_fused_rms_norm)")
_is_layer_norm = matching(r"(?<!RMS)(?<!Rms)LayerNorm$")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find RMSNorm or LayerNorm modules that take longer than moving x, y and their gradients.

    Norms of several kernels come first; if there are none, those that torch fuses are judged.
    """
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(lambda c: is_stream(c) and _is_norm(c.place.module_class))
    if not calls:
        return None
    modules = {name: group for name, group in by_module(calls).items() if not _runs_fused(group)}
    is_fused = not modules
    if is_fused:
        modules = by_module([call for call in calls if _is_fused(call.name)])
    calls = [call for group in modules.values() for call in group]
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
    what = "below the copy ceiling" if is_fused else "in separate kernels"
    reached = fused_ms / time_ms if time_ms else 1.0
    return evidence.finding(
        title=f"{len(modules)} × {', '.join(classes)} {what}",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}",
        cause=f"torch runs one op each way, but its kernels reach {reached:.0%} of a copy's rate"
        if is_fused
        else _cause(calls),
        fix=f"patch:{op}",
        gain_ms=evidence.gain_ms(calls, fused_ms, fused_kernels),
        gain_bytes=evidence.saved_bytes(_vanishes) - kept_bytes,
    )


def _runs_fused(group: list[Call]) -> bool:
    """Return whether torch has one op each way; gradients that meet at x are summed beside it."""
    others = [call for call in group if not _is_fused(call.name)]
    return len(others) < len(group) and all(
        call.name == "aten::add" and call.phase == "backward" for call in others
    )


def _cause(calls: list[Call]) -> str:
    casts = any(call.name == "aten::_to_copy" for call in calls)
    cause = f"each {'cast, ' * casts}square, mean and product reads and writes the whole tensor"
    if any(call.phase == "backward" for call in calls):
        kept = "fp32 copies" if casts else "results between them"
        cause += f", and {kept} are kept for the backward pass"
    return cause


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

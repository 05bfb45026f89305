"""Activations that fill the memory although they could be computed again."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State, gib
from nearlight.profiler.capture import Trace
from nearlight.profiler.memory import Storage
from nearlight.profiler.rules.evidence import Evidence, matching

_is_layer = matching(r"(^|\.)(layers|h|blocks|layer)\.\d+(\.|$)")
_layer_itself = matching(r"(^|\.)(layers|h|blocks|layer)\.\d+$")
# Checkpointing costs a forward pass, a third of a training step's products: not worth naming where
# it frees less than about as much of the memory.
LARGE_SHARE = 0.3


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find a training step whose peak is mostly activations of repeated layers."""
    activations = state.memory.get("activations", 0)
    if trace.task != "train" or activations < LARGE_SHARE * state.peak_bytes:
        return None
    evidence = Evidence(trace, state, gpu)
    saved = evidence.saved_bytes(_vanishes)
    again = evidence.calls(lambda c: c.phase == "forward" and _is_layer(c.place.module))
    again_ms = evidence.time_ms(again)
    if not again or any(call.is_recomputed for call in trace.calls):
        return None
    return evidence.finding(
        title=f"activations hold {gib(activations)} of the {gib(state.peak_bytes)} peak",
        evidence=f"{activations / state.peak_bytes:.0%} of the peak; layers checkpointed one by "
        f"one would free {gib(saved)} and compute {len(again)} forward calls again "
        f"({again_ms:.1f} ms)",
        cause="every layer keeps what its backward pass needs until that pass reaches it",
        fix="",
        gain_ms=-again_ms,
        gain_bytes=saved,
        next_step="where memory is short: model.gradient_checkpointing_enable(), or a larger "
        "batch after the fused fixes",
    )


def _vanishes(storage: Storage) -> bool:
    # A checkpointed layer keeps its input, which is the output of the layer before.
    is_inside = _is_layer(storage.place.module) and storage.owner == "activations"
    is_kept = storage.is_module_output and _layer_itself(storage.place.module)
    return is_inside and not is_kept

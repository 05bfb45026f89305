"""A step that needs more memory than the GPU has."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State, gib
from nearlight.profiler.capture import Trace
from nearlight.profiler.predict import capacity_bytes

TITLE = "does not fit"
_PER_SAMPLE = ("activations", "temporaries", "inputs")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find a peak above the GPU's memory, and say which batch would fit."""
    capacity = capacity_bytes(gpu)
    if state.peak_bytes <= capacity:
        return None
    owners = sorted(state.memory.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{owner} {gib(size)}" for owner, size in owners if size)
    return Finding(
        title=f"{TITLE}: {gib(state.peak_bytes)} on a GPU with {gib(capacity)} for tensors",
        evidence=f"at the peak: {parts}",
        cause=f"{owners[0][0]} take the largest part" if owners else "the peak is too high",
        fix="",
        gain_ms=0.0,
        gain_bytes=0,
        next_step=_advice(trace, state, capacity),
    )


def _advice(trace: Trace, state: State, capacity: int) -> str:
    per_batch = sum(state.memory.get(owner, 0) for owner in _PER_SAMPLE)
    fixed = state.peak_bytes - per_batch
    if fixed >= capacity or not trace.num_samples:
        return (
            "parameters and optimizer state alone do not fit: take a larger GPU, shard them over "
            "several, or keep the optimizer state in fewer bits"
        )
    samples = int((capacity - fixed) / (per_batch / trace.num_samples))
    if samples < 1:
        return "a batch of one does not fit either: shorten the sequence or checkpoint activations"
    return f"a batch of about {samples} fits without any fix; the findings below make room"

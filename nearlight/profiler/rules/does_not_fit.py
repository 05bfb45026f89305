"""A step that needs more memory than the GPU has."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State, gib
from nearlight.profiler.capture import Trace
from nearlight.profiler.predict import capacity_bytes

TITLE = "does not fit"
_PER_SAMPLE = ("activations", "temporaries", "inputs")
_NAMES = {"optimizer": "optimizer state"}


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
        cause=_cause(state, capacity),
        fix="",
        gain_ms=0.0,
        gain_bytes=0,
        next_step=_advice(trace, state, capacity),
    )


def _per_batch(state: State) -> int:
    return sum(state.memory.get(owner, 0) for owner in _PER_SAMPLE)


def _fixed_owners(state: State) -> str:
    """Return "parameters, gradients and optimizer state", of those that hold memory."""
    owners = [owner for owner, size in state.memory.items() if size and owner not in _PER_SAMPLE]
    names = [_NAMES.get(owner, owner) for owner in owners] or ["what every batch needs"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _cause(state: State, capacity: int) -> str:
    per_batch = _per_batch(state)
    fixed = state.peak_bytes - per_batch
    if fixed >= capacity:
        return f"{_fixed_owners(state)} alone take {gib(fixed)}, whatever the batch"
    return (
        f"what grows with the batch takes {gib(per_batch)} at the peak, beside {gib(fixed)} of "
        f"{_fixed_owners(state)}"
    )


def _advice(trace: Trace, state: State, capacity: int) -> str:
    per_batch = _per_batch(state)
    fixed = state.peak_bytes - per_batch
    if fixed >= capacity:
        fewer = ", or keep the optimizer state in fewer bits" * bool(state.memory.get("optimizer"))
        return f"take a larger GPU, or shard {_fixed_owners(state)} over several{fewer}"
    samples = int((capacity - fixed) / (per_batch / trace.num_samples))
    if samples < 1:
        return "a batch of one does not fit either: shorten the sequence or checkpoint activations"
    return f"a batch of about {samples} fits without any fix; the findings below make room"

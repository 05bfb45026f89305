"""Logits over the vocabulary written out whole, and copies of them in fp32."""

from __future__ import annotations

from math import prod

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State, gib
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.memory import Storage
from nearlight.profiler.rules.evidence import (
    Evidence,
    describe_calls,
    is_stream,
    largest_bytes,
)

# The fused loss works through the logits in chunks of about this size.
CHUNK_BYTES = 512 * 2**20
_LOSSES = ("aten::_log_softmax", "aten::nll_loss_forward")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find a cross entropy over logits that a linear layer wrote to memory."""
    evidence = Evidence(trace, state, gpu)
    losses = [c for c in trace.calls if c.name in _LOSSES and c.phase == "forward"]
    widths = {c.inputs[0].shape[-1] for c in losses if c.inputs}
    heads = [c for c in trace.calls if _makes_logits(c, widths) and c.phase == "forward"]
    if not losses or not heads:
        return None
    vocab = heads[-1].outputs[0].shape[-1]
    rows = sum(_rows(call, vocab) for call in heads)
    calls = [call for call in trace.calls if is_stream(call) and _is_wide(call, vocab, rows)]
    logits_bytes = sum(largest_bytes(call.outputs) for call in heads)
    time_ms = evidence.time_ms(calls)
    alive = sum(
        storage.num_bytes
        for storage in trace.timeline.alive(trace.timeline.peak().event)
        if _spans(storage, vocab, rows)
    )
    saved = evidence.saved_bytes(lambda storage: _spans(storage, vocab, rows))
    return evidence.finding(
        title=f"logits of {rows} × {vocab} are materialised",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}; "
        f"{gib(alive)} of the {gib(state.peak_bytes)} peak are logits, their softmax and gradients",
        cause=_cause(calls),
        fix="patch:linear_cross_entropy",
        # One read of the logits and one write of their gradient, chunk by chunk.
        gain_ms=evidence.gain_ms(calls, evidence.stream_ms(2 * logits_bytes, 1), 1),
        gain_bytes=max(saved - min(CHUNK_BYTES, logits_bytes), 0),
    )


def _cause(calls: list[Call]) -> str:
    casts = any(call.name == "aten::_to_copy" and call.phase == "forward" for call in calls)
    is_training = any(call.phase == "backward" for call in calls)
    return (
        f"the loss {'casts the logits to fp32, and ' * casts}writes log-softmax"
        f"{' and two gradients of the same size' * is_training}"
    )


def _makes_logits(call: Call, widths: set[int]) -> bool:
    return call.cost.pattern == "matmul" and bool(
        call.outputs and call.outputs[0].shape and call.outputs[0].shape[-1] in widths
    )


def _rows(call: Call, vocab: int) -> int:
    return prod(call.outputs[0].shape) // vocab


def _is_wide(call: Call, vocab: int, rows: int) -> bool:
    metas = (*call.inputs, *call.outputs)
    return call.phase != "optimizer" and any(_covers(meta.shape, vocab, rows) for meta in metas)


def _spans(storage: Storage, vocab: int, rows: int) -> bool:
    is_made_here = storage.phase in ("forward", "backward")
    return is_made_here and _covers(storage.shape, vocab, rows)


def _covers(shape: tuple[int, ...], vocab: int, rows: int) -> bool:
    """Return whether a shape is that of the logits; shifting may cost or add a token a row."""
    if len(shape) < 2 or shape[-1] != vocab:
        return False
    return abs(prod(shape[:-1]) - rows) <= max(shape[0], rows // 64)

"""Attention that writes its scores to memory."""

from __future__ import annotations

from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.memory import Storage
from nearlight.profiler.rules.evidence import Evidence, by_module, describe_calls, matching

_is_attention = matching(r"Attention|Attn")
_SCORES = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data")
_SCORE_PASSES = ("aten::mul", "aten::add", "aten::_to_copy", "aten::native_dropout", "aten::where")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find attention made of matrix products and a softmax."""
    evidence = Evidence(trace, state, gpu)
    soft = evidence.calls(
        lambda c: c.name == "aten::_softmax" and _is_attention(c.place.module_class)
    )
    if not soft:
        return None
    shapes = {call.outputs[0].shape for call in soft}
    calls = evidence.calls(
        lambda c: _is_attention(c.place.module_class) and _touches_scores(c, shapes)
    )
    time_ms = evidence.time_ms(calls)
    is_training = any(call.phase == "backward" for call in calls)
    return evidence.finding(
        title=f"{len(by_module(soft))} attentions write their scores to memory",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}; scores "
        f"{' × '.join(map(str, soft[0].outputs[0].shape))}",
        cause="eager attention (or a head too wide for the fused kernels) runs as products and "
        "softmax; a fused kernel never writes the scores",
        fix="",
        gain_ms=evidence.gain_ms(calls, _fused_ms(calls, gpu), len(soft) * (1 + is_training)),
        gain_bytes=evidence.saved_bytes(
            lambda storage: _is_score(storage, shapes) and storage.phase == "forward"
        ),
        next_step='load the model with attn_implementation="sdpa"; a softcap on the scores needs '
        '"flex_attention"',
    )


def _touches_scores(call: Call, shapes: set[tuple[int, ...]]) -> bool:
    if call.name in _SCORES:
        return True
    return call.name in _SCORE_PASSES and any(meta.shape in shapes for meta in call.outputs)


def _is_score(storage: Storage, shapes: set[tuple[int, ...]]) -> bool:
    flat = {(shape[0] * shape[1], *shape[2:]) for shape in shapes if len(shape) == 4}
    return storage.shape in shapes or storage.shape in flat


def _fused_ms(calls: list[Call], gpu: Gpu) -> float:
    """Return the time a fused kernel needs for the same products."""
    rate_tflops = ceilings(gpu).attention_tflops(None)
    flops = sum(call.cost.total_flops for call in calls if call.cost.pattern == "matmul")
    return flops / (rate_tflops * 1e12) * 1e3

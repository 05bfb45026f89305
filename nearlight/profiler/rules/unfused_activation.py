"""An activation as separate kernels; where gated: act(gate), then × up, and five passes back."""

from __future__ import annotations

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.memory import Storage
from nearlight.profiler.rules.evidence import (
    Evidence,
    describe_calls,
    is_stream,
    largest_bytes,
    matching,
)

_is_mlp = matching(r"MLP|FeedForward|FFN|GatedMlp")
_is_activation = matching(r"(SiLU|Silu|Swish|GELU|Gelu|NewGELU|QuickGELU)")
_ACTIVATIONS = ("aten::silu", "aten::gelu", "aten::tanh", "aten::sigmoid")


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find activations of feed-forward blocks that run as more than one kernel each way."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(_belongs)
    forward = [call for call in calls if call.phase == "forward"]
    if not any(call.name.startswith(_ACTIVATIONS) for call in forward):
        return None
    is_silu = any(call.name.startswith("aten::silu") for call in forward)
    is_gated = any(_is_gate(call) for call in forward)
    blocks = [call for call in forward if call.name.startswith(_ACTIVATIONS)]
    if len(forward) == len(blocks):
        return None  # one kernel per block already
    size = sum(largest_bytes(call.outputs) for call in blocks)
    is_training = any(call.phase == "backward" for call in calls)
    # Gated: gate and up in, h out; back: both and the gradient in, two gradients out.
    passes = (3 + 5 * is_training) if is_gated else (2 + 3 * is_training)
    time_ms = evidence.time_ms(calls)
    fused_kernels = len(blocks) * (1 + is_training)
    fused_ms = evidence.stream_ms(passes * size, fused_kernels)
    has_fix = is_silu and is_gated
    name = "SwiGLU" if has_fix else "activation"
    return evidence.finding(
        title=f"{len(blocks)} × {name} in separate kernels",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}",
        cause=_cause(is_gated, is_training),
        fix="patch:swiglu" if has_fix else "",
        gain_ms=evidence.gain_ms(calls, fused_ms, fused_kernels),
        gain_bytes=evidence.saved_bytes(_vanishes),
        next_step=""
        if has_fix
        else "torch.compile fuses the activation; nearlight has no kernel for this one",
    )


def _cause(is_gated: bool, is_training: bool) -> str:
    if not is_gated:
        kept = ", and several are kept for the backward pass" if is_training else ""
        return f"its steps are kernels of their own: each result is written and read again{kept}"
    kept = ", and kept for the backward pass although gate and up give it back"
    return "the activation is written and read again for the next product" + kept * is_training


def _is_gate(call: Call) -> bool:
    """Return whether a call multiplies two tensors of one shape in a feed-forward block."""
    shapes = [meta.shape for meta in call.inputs]
    is_product = call.name == "aten::mul" and len(shapes) == 2 and shapes[0] == shapes[1]
    return is_product and _is_mlp(call.place.module_class)


def _belongs(call: Call) -> bool:
    place = call.place
    is_inside = _is_activation(place.module_class) or (
        _is_mlp(place.module_class) and "Norm" not in place.module_class
    )
    is_product = call.name in ("aten::mul", "aten::add", "aten::cat", "aten::pow", "aten::neg")
    is_known = call.name.startswith(_ACTIVATIONS) or is_product or "backward" in call.name
    return is_stream(call) and is_inside and is_known


def _vanishes(storage: Storage) -> bool:
    is_inside = _is_activation(storage.place.module_class) or _is_mlp(storage.place.module_class)
    # The product at the end stays: the next projection needs it for its weight gradient.
    return storage.phase == "forward" and is_inside and storage.op.startswith(_ACTIVATIONS)

"""Matrix products on the fp32 pipe while tensor cores idle."""

from __future__ import annotations

from dataclasses import replace

from nearlight.core.hardware import Gpu, ceilings
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Call, Trace
from nearlight.profiler.predict import predict_call_s
from nearlight.profiler.rules.evidence import Evidence, describe_calls


def find(trace: Trace, state: State, gpu: Gpu) -> Finding | None:
    """Find products in fp32 that TF32 tensor cores could do."""
    evidence = Evidence(trace, state, gpu)
    calls = evidence.calls(lambda c: c.cost.pattern != "stream" and "fp32" in c.cost.flops)
    if not calls or "tf32" not in gpu.peaks_tflops:
        return None
    time_ms = evidence.time_ms(calls)
    reached = ceilings(gpu)
    tf32_ms = sum(predict_call_s(_as_tf32(call), reached, gpu) for call in calls) * 1e3
    return evidence.finding(
        title=f"{len(calls)} matrix products run on the fp32 pipe",
        evidence=f"{describe_calls(calls, time_ms)}, {evidence.share(time_ms)}",
        cause="weights and activations are fp32, and PyTorch keeps full fp32 products unless told "
        "otherwise",
        fix="",
        gain_ms=time_ms - tf32_ms,
        next_step="approximate: torch.set_float32_matmul_precision('high') takes TF32, "
        "autocast to bf16 more",
    )


def _as_tf32(call: Call) -> Call:
    return replace(call, cost=replace(call.cost, flops={"tf32": call.cost.flops["fp32"]}))

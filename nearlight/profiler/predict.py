"""Predict the time and the memory of a traced step on a GPU of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from nearlight.core.ceilings import Ceilings
from nearlight.core.errors import BadInput
from nearlight.core.hardware import Gpu, ceilings, find_gpu
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Figure, Report, State
from nearlight.core.versions import versions
from nearlight.profiler import verdicts
from nearlight.profiler.capture import Call, Trace, trace
from nearlight.profiler.kernel_efficiency import efficiency
from nearlight.profiler.memory import describe
from nearlight.profiler.target import Target, check_gpu, from_model, load

# Peak memory of a trace against `torch.cuda.max_memory_allocated`; the peaks predicted so far were
# off by 0.1% (docs/log.md), other programs may hold what a trace does not see.
MEMORY_ERROR = 0.10
# Host time depends on the CPU and on how much Python stands between two ops: the one host-bound
# step measured, decoding with Llama-3.2-1B, is predicted at 14.8 ms and took 20.7 (−28%).
HOST_ERROR = 0.40
PEAK_TENSORS = 40
# Device memory that a process cannot have for tensors: CUDA context, workspaces of libraries,
# fragments. A cautious choice, not a measurement.
OUTSIDE_ALLOCATOR_BYTES = 2 * 2**30


def setup_line(target: Target) -> str:
    """Return line two of a report: what was chosen for the user, the optimizer with it."""
    return target.setup + (", fused AdamW" if target.task == "train" else "")


def step_limit(trace: Trace, gpu: Gpu) -> float:
    """Return the limit of a step in seconds; it is computed once, from the program as found.

    limit = Σ call limits of matrix products, attentions and convolutions
            + (parameters + gradients + optimizer state + inputs) ÷ bandwidth

    What could be fused counts nothing, recomputed products count once, and operands that fit in
    L2 are not charged to memory.

    Args:
        trace: the program as found.
        gpu: a row of the GPU table.
    """
    products_s = sum(
        verdicts.call_limit_s(call.cost, gpu)
        for call in trace.calls
        if call.cost.pattern != "stream" and not call.is_recomputed
    )
    return products_s + _moved_bytes(trace) / (gpu.memory_gbps * 1e9)


def predict_call_s(call: Call, reached: Ceilings, gpu: Gpu) -> float:
    """Return a call's predicted device time: limit ÷ achievable fraction + launches.

    Args:
        call: of a trace.
        reached: the GPU's ceilings.
        gpu: the GPU.
    """
    # Element-wise arithmetic never comes near its pipe; only its bytes take time.
    cost = call.cost
    judged = replace(cost, flops={}) if cost.pattern == "stream" else cost
    time_s = reached.time_s(judged) / efficiency(call)
    return max(time_s, cost.limit_s(gpu)) + cost.num_kernels * reached.kernel_floor_us * 1e-6


def predict_state(trace: Trace, gpu: Gpu, limit_s: float | None = None) -> State:
    """Predict a step: device time per op, host time, and the memory peak by owner.

    The step takes as long as the slower of the GPU (kernels one after another) and the host
    (every op it works through), and never less than the limit.

    Args:
        trace: of the program as it stands.
        gpu: a row of the GPU table.
        limit_s: limit of the step from the program as found; this trace's own by default.

    Returns:
        a State of mode "predicted"; every figure has an interval.

    Example:
        >>> state = predict_state(trace(target), find_gpu("h200"))  # doctest: +SKIP
    """
    reached = ceilings(gpu)
    limit_s = step_limit(trace, gpu) if limit_s is None else limit_s
    timed = [
        (call.name, call.place.module, call.cost, predict_call_s(call, reached, gpu))
        for call in trace.calls
    ]
    unmodelled_s = sum(
        time_s
        for call, (*_, time_s) in zip(trace.calls, timed, strict=True)
        if not call.is_modelled
    )
    gpu_s = sum(time_s for *_, time_s in timed)
    host_s = trace.num_host_ops * reached.host_us_per_op * 1e-6
    step_s = max(gpu_s, host_s, limit_s)
    rows = verdicts.op_rows(timed, gpu, reached.kernel_floor_us)
    if step_s > gpu_s:
        rows.append(verdicts.idle_row(step_s - gpu_s))
        rows.sort(key=lambda row: -row.time_ms)
    peak = trace.timeline.peak()
    state = State(
        mode="predicted",
        step_ms=step_s * 1e3,
        tokens_per_s=None if trace.num_tokens is None else trace.num_tokens / step_s,
        samples_per_s=trace.num_samples / step_s,
        peak_bytes=peak.num_bytes,
        limit_ms=limit_s * 1e3,
        share=limit_s / step_s,
        ops=tuple(rows),
        memory=trace.timeline.by_owner(peak),
        peak_tensors=tuple(describe(trace.timeline.alive(peak.event), PEAK_TENSORS)),
        pipe=verdicts.main_pipe(call.cost for call in trace.calls),
    )
    return replace(state, figures=_figures(state, reached, unmodelled_s * 1e3))


def capacity_bytes(gpu: Gpu) -> int:
    """Return how much memory tensors can have on a GPU."""
    return gpu.memory_bytes - OUTSIDE_ALLOCATOR_BYTES


def predict(
    model: nn.Module | str,
    batch: Any = None,
    gpu: str | Sequence[str] = "h200",
    task: str = "train",
) -> Report:
    """Predict step time, peak memory, bounds and fit on GPUs that need not be here.

    Args:
        model: a module (left as it is, wherever it lies), or the name of a target.
        batch: dict of tensors by forward's argument names; None where `model` is a name.
        gpu: name of a GPU of the table, or several.
        task: "train", "prefill" or "decode".

    Returns:
        a Report with a row per GPU; `before` and the findings are those of the first.

    Raises:
        BadInput: an unknown GPU, target or task, or a program that values decide about.

    Example:
        >>> report = predict("llama-3.2-1b", gpu=["h200", "l40s"])
        >>> [row["gpu"] for row in report.rows]
        ['h200', 'l40s']
    """
    gpus = [find_gpu(name) for name in ([gpu] if isinstance(gpu, str) else gpu)]
    if isinstance(model, str):
        if batch is not None:
            raise BadInput(f"{model!r} brings its own batch: leave out batch")
        return predict_target(load(model, task=task), gpus)
    return predict_target(from_model(model, batch, task), gpus)


def predict_target(target: Target, gpus: Sequence[Gpu], progress: Progress = silent) -> Report:
    """Predict a target on one or several GPUs; the report's `before` is the first one's.

    Args:
        target: a loaded target.
        gpus: rows of the GPU table, at least one.
        progress: is told what happens.

    Returns:
        a Report with a row per GPU and the findings for the first.
    """
    from nearlight.profiler import rules

    for gpu in gpus:
        check_gpu(target, gpu)
    progress(f"tracing {target.name}")
    step = trace(target)
    states = {gpu.key: predict_state(step, gpu) for gpu in gpus}
    first = gpus[0]
    state = states[first.key]
    rows = [_gpu_row(gpu, states[gpu.key]) for gpu in gpus]
    does_fit = "fits" if rows[0]["fits"] else "does not fit"
    return Report(
        verb="predict",
        answer=(
            f"{target.name} on {first.key}: {state.step_ms:.1f} ms a step, "
            f"{state.share:.0%} of its limit, {state.peak_bytes / 2**30:.1f} GiB ({does_fit})"
        ),
        target=target.name,
        task=target.task,
        gpu=first.key,
        setup=setup_line(target),
        versions=versions(),
        before=state,
        findings=rules.find(step, state, first),
        rows=rows,
        next=f"next: nearlight optimize {target.name} --gpu {first.key} applies and proves fixes",
    )


def _gpu_row(gpu: Gpu, state: State) -> dict[str, Any]:
    return {
        "gpu": gpu.key,
        "step_ms": state.step_ms,
        "tokens_per_s": state.tokens_per_s,
        "share": state.share,
        "peak_bytes": state.peak_bytes,
        "fits": state.peak_bytes <= capacity_bytes(gpu),
        "validated": ceilings(gpu).validated,
    }


def _moved_bytes(trace: Trace) -> int:
    return trace.parameter_bytes + trace.gradient_bytes + trace.optimizer_bytes + trace.input_bytes


def _figures(state: State, reached: Ceilings, unmodelled_ms: float) -> dict[str, Figure]:
    slow, fast = reached.high_factor, reached.low_factor
    if any(row.bound == "idle" for row in state.ops):
        slow, fast = max(slow, 1 + HOST_ERROR), min(fast, 1 - HOST_ERROR)
    fast = max(fast, state.limit_ms / state.step_ms)
    note = "" if reached.validated else " (not validated on this GPU)"
    source = (
        f"trace on fake tensors; ceilings: {reached.source}{note}; the interval is that of the "
        "whole step, single ops err more"
    )

    def rate(value: float | None, unit: str) -> dict[str, Figure]:
        if value is None:
            return {}
        key = f"{unit.partition('/')[0]}_per_s"
        return {key: Figure(value, unit, "predicted", source, value / slow, value / fast)}

    step, peak = state.step_ms, state.peak_bytes
    return {
        "step_ms": Figure(step, "ms", "predicted", source, step * fast, step * slow),
        **rate(state.tokens_per_s, "tokens/s"),
        **rate(state.samples_per_s, "samples/s"),
        "peak_bytes": Figure(
            peak,
            "bytes",
            "predicted",
            "allocations of the trace, in blocks of 512 bytes",
            peak * (1 - MEMORY_ERROR),
            peak * (1 + MEMORY_ERROR),
        ),
        "limit_ms": Figure(state.limit_ms, "ms", "derived", "flops and bytes over datasheet peaks"),
        "unmodelled_ms": Figure(
            unmodelled_ms, "ms", "predicted", "ops without a cost model, as if they were streams"
        ),
        "share": Figure(
            state.share,
            "",
            "derived",
            "limit_ms ÷ step_ms",
            state.share / slow,
            min(1.0, state.share / fast),
        ),
    }

"""What bounds a call, and the rows of a report: time against limit, by op and module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nearlight.core.cost import Cost
from nearlight.core.hardware import Gpu
from nearlight.core.report import OpRow

# A kernel whose busier pipe works less than this waits for something else: of torch's
# kernels on wide, dense rows the slowest, LayerNorm backward, still reaches 0.33 on an H200.
LATENCY_BELOW_SHARE = 0.3
# Of a row whose share would be above 1.
BEYOND_LIMIT = (
    "faster than its limit: the step that was timed did less here than the one that was recorded, "
    "or found data in L2"
)
_COMMUNICATION = ("c10d::", "_c10d_functional::", "nccl")


@dataclass
class _Sum:
    calls: int = 0
    time_s: float = 0.0
    limit_s: float = 0.0
    memory_s: float = 0.0
    compute_s: float = 0.0
    launch_s: float = 0.0
    flops: int = 0
    bytes: int = 0
    is_l2_resident: bool = True
    is_modelled: bool = True


def call_limit_s(cost: Cost, gpu: Gpu) -> float:
    """Return a call's limit inside a step; bytes that fit in L2 are not judged."""
    return cost.flops_s(gpu) if fits_l2(cost, gpu) else cost.limit_s(gpu)


def fits_l2(cost: Cost, gpu: Gpu) -> bool:
    """Return whether all a call touches may lie in L2 already."""
    return cost.bytes <= gpu.l2_bytes


def op_rows(
    calls: Iterable[tuple[str, str, Cost | None, float]], gpu: Gpu, kernel_floor_us: float
) -> list[OpRow]:
    """Sum calls `(name, module, cost, time in s)` to rows, slowest first, each with its bound.

    Args:
        calls: device times, measured or predicted; the cost None is that of an unknown op.
        gpu: whose limits count.
        kernel_floor_us: device time of a kernel that does nothing.
    """
    sums: dict[tuple[str, str], _Sum] = {}
    for name, module, cost, time_s in calls:
        total = sums.setdefault((name, module), _Sum())
        total.calls += 1
        total.time_s += time_s
        if cost is None:
            total.is_modelled = False
            continue
        total.limit_s += call_limit_s(cost, gpu)
        total.memory_s += cost.bytes_s(gpu)
        total.compute_s += cost.flops_s(gpu)
        total.launch_s += cost.num_kernels * kernel_floor_us * 1e-6
        total.flops += cost.total_flops
        total.bytes += cost.bytes
        total.is_l2_resident &= fits_l2(cost, gpu)
    rows = [_row(name, module, total) for (name, module), total in sums.items()]
    return sorted(rows, key=lambda row: -row.time_ms)


def main_pipe(costs: Iterable[Cost]) -> str:
    """Return the pipe that does most of the flops, "" where there are none."""
    flops: Counter[str] = Counter()
    for cost in costs:
        flops.update(cost.flops)
    return max(flops, key=lambda pipe: flops[pipe], default="")


def idle_row(idle_s: float) -> OpRow:
    """Return the row of the time in which the GPU waits for the host."""
    return OpRow("idle", "", 0, idle_s * 1e3, 0.0, None, "idle", 0, 0)


def _row(name: str, module: str, total: _Sum) -> OpRow:
    is_judged = total.limit_s > 0 and total.time_s > 0 and total.is_modelled
    is_beyond = is_judged and total.limit_s > total.time_s
    return OpRow(
        name=name,
        module=module,
        calls=total.calls,
        time_ms=total.time_s * 1e3,
        limit_ms=total.limit_s * 1e3,
        share=total.limit_s / total.time_s if is_judged and not is_beyond else None,
        bound=_bound(name, total),
        flops=total.flops,
        bytes=total.bytes,
        remark=BEYOND_LIMIT if is_beyond else "",
    )


def _bound(name: str, total: _Sum) -> str:
    if name.startswith(_COMMUNICATION):
        return "communication"
    if not total.is_modelled:
        return "unmodelled"
    if total.launch_s >= total.time_s / 2:
        return "launch"
    if total.is_l2_resident and total.memory_s >= total.compute_s:
        return "L2"
    if max(total.memory_s, total.compute_s) < LATENCY_BELOW_SHARE * total.time_s:
        return "latency"
    return "memory" if total.memory_s >= total.compute_s else "compute"

"""`bench`: the time of an op on this GPU, beside its peers in the same run; no speed unproved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nearlight.core import timing
from nearlight.core.errors import BadInput
from nearlight.core.hardware import ceilings, require_gpu
from nearlight.core.numerics import NUM_DRAWS
from nearlight.core.op import Case, Op
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Report, require_writable
from nearlight.core.versions import peer_versions, versions
from nearlight.workbench.bench_report import COPY, OURS, Row, report_of
from nearlight.workbench.compare import Leniency, noting
from nearlight.workbench.memory import extra_bytes
from nearlight.workbench.record import PACKAGE
from nearlight.workbench.trial import Trial, differentiable, make_inputs
from nearlight.workbench.work import (
    NUM_SETS,
    Machine,
    Work,
    cloned,
    compute,
    differs_after,
    differs_before,
    expected_of,
    timed_call,
)

DIRECTIONS = ("forward", "forward_backward")
TORCH, COMPILE = "torch", "compile"
# Measured whenever the op has it; others are asked for by name.
ALWAYS = (TORCH, COMPILE, "liger")
MIN_REPEATS = 20


def bench(
    op: Op,
    peers: Sequence[str] = (),
    cases: Sequence[Case] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    *,
    into_repo: bool = False,
    progress: Progress = silent,
) -> Report:
    """Time an op against plain PyTorch, torch.compile, liger-kernel and others, interleaved.

    share = limit ÷ time; ratio = a peer's time ÷ ours. Results are held to the tolerance rule
    before the timing, and ours once more after it with new values in the timed inputs: where ours
    is wrong, no speed is printed; where a peer is, its row says so. Losing rows are printed like
    winning ones.

    Args:
        op: the record of an op, nearlight's or the user's.
        peers: further names of `op.peers`.
        cases: by default all of `op.cases`.
        directions: "forward", "forward_backward" or both.
        into_repo: write the result into the package's data instead of the user's folder.
        progress: told what goes on.

    Returns:
        A report with a row for each case, direction and implementation, the copy of the same
        bytes among them, and rows of the host's cost; also written as JSON. `proof.passed` says
        whether ours has a speed everywhere.

    Raises:
        MissingPart: there is no GPU.
        BadInput: a peer or direction that does not exist.

    Example:
        >>> from nearlight.workbench.bench import bench
        >>> from nearlight.workbench.load import load_op
        >>> print(bench(load_op("rms_norm"), peers=["quack"]).answer)  # doctest: +SKIP
    """
    import platformdirs

    gpu = require_gpu("bench", "nearlight check and nearlight inspect need none")
    root = PACKAGE / "data" if into_repo else Path(platformdirs.user_data_dir("nearlight"))
    path = root / "results" / gpu.key / f"bench-{op.name}.json"
    require_writable(path)
    machine = Machine("cuda", gpu)
    rows = measure(op, machine, peers, cases, directions, progress)
    report = report_of(op, gpu, rows, {**versions(on_gpu=True), **peer_versions()})
    report.save_json(path)
    progress(f"written to {path}")
    return report


def measure(
    op: Op,
    machine: Machine,
    peers: Sequence[str] = (),
    cases: Sequence[Case] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    progress: Progress = silent,
) -> list[Row]:
    """Return the rows of `bench` for a machine; arguments as there."""
    unknown = [name for name in directions if name not in DIRECTIONS]
    if unknown:
        raise BadInput(f"direction {unknown[0]!r}: allowed are {', '.join(DIRECTIONS)}")
    unknown = [name for name in peers if name not in (*op.peers, TORCH, COMPILE)]
    if unknown:
        raise BadInput(
            f"{op.name} has no peer {unknown[0]!r}; it has {', '.join((*op.peers, COMPILE))}"
        )
    small = min(op.check_cases, key=lambda case: (case.dtype == torch.float64, Trial(case).size))
    if not differentiable(make_inputs(op, Trial(small), machine.device)):  # an optimizer, say
        directions = [name for name in directions if name == "forward"]
    rows: list[Row] = []
    for case in op.cases if cases is None else cases:
        for direction in directions:
            progress(f"{op.name} {case.name} {direction}")
            rows += _measure_case(op, machine, peers, case, direction)
            if machine.device == "cuda":
                torch.cuda.empty_cache()
    for direction in directions:
        progress(f"{op.name} host cost {direction}")
        rows += _host_rows(op, machine, peers, small, direction)
    return rows


def implementations(
    op: Op, peers: Sequence[str]
) -> Iterator[tuple[str, Callable[..., Any] | None, str]]:
    """Yield name, function and what is missing: ours first, then every peer, found or not."""
    yield OURS, op.function, ""
    plain = op.peers[TORCH]() if TORCH in op.peers else op.reference
    yield TORCH, plain, ""
    # A fresh compilation for each case: else its limit of recompilations falls back to eager.
    torch.compiler.reset()
    yield COMPILE, torch.compile(plain), ""
    for name in dict.fromkeys((*ALWAYS, *peers)):
        if name in op.peers and name not in (TORCH, COMPILE):
            try:
                yield name, op.peers[name](), ""
            except ImportError as error:
                yield name, None, f"not installed: {error}"


def _measure_case(
    op: Op, machine: Machine, peers: Sequence[str], case: Case, direction: str
) -> list[Row]:
    """Check, time and check again all implementations of a case, interleaved."""
    is_backward = direction == "forward_backward"
    sets = [make_inputs(op, Trial(case, seed=seed), machine.device) for seed in range(NUM_SETS)]
    expected, truth = expected_of(op, sets[0], Trial(case), is_backward)
    upstream = expected.upstream if is_backward else None
    rows: dict[str, Row] = {}
    works: dict[str, Work] = {}
    for name, function, missing in implementations(op, peers):
        rows[name] = {"case": case.name, "direction": direction, "implementation": name}
        rows[name]["check"] = missing
        if function is None:
            continue
        try:
            granted = Leniency()
            with noting(granted):
                # A peer's verdict is a remark, not worth minutes of a GPU.
                num_draws = NUM_DRAWS if name == OURS else 0
                given = (op, function, case, machine, expected, is_backward, num_draws)
                reason = differs_before(*given)
            held = "; ".join([f"held to {truth}", *granted.remarks()])
            rows[name]["check"] = f"wrong: {reason}" if reason else held
            if name != OURS or not reason:
                works[name] = Work(function, [cloned(inputs) for inputs in sets], upstream)
                num_bytes, is_in_place = _extra_bytes(works[name], machine)
                rows[name]["extra_bytes"] = num_bytes
                rows[name]["check"] += "; in place" * is_in_place
        except Exception as error:  # an implementation that fails is a row, not the run's end
            works.pop(name, None)
            rows[name]["check"] = f"raised {type(error).__name__}: {str(error)[:120]}"
    cost = op.cost(case)[direction]
    calls: dict[str, Any] = {name: work.calls() for name, work in works.items()}
    calls[COPY] = _copy_calls(cost.bytes, machine.device)
    timed = timing.compare(calls, device=machine.device, min_repeats=MIN_REPEATS)
    ours = works.get(OURS)
    del expected, sets, works, calls  # the check needs the memory
    if ours is not None:
        if reason := differs_after(op, ours, case, machine):
            timed.pop(OURS)
            rows[OURS]["check"] = f"wrong after the timing: {reason}"
    rows[COPY] = {"case": case.name, "direction": direction, "implementation": COPY, "check": ""}
    for name, row in rows.items():
        if name in timed:
            row |= _figures(name, timed, cost.limit_s(machine.gpu) * 1e6)
    if "time_us" in rows[OURS]:
        predicted_us = ceilings(machine.gpu).predict_s(cost) * 1e6
        rows[OURS]["predicted_us"] = predicted_us
        rows[OURS]["prediction_error"] = predicted_us / rows[OURS]["time_us"] - 1
    _hold_to_declared(rows[OURS], op.extra_bytes(case) if is_backward else None)
    return list(rows.values())


def _hold_to_declared(row: Row, declared_bytes: int | None) -> None:
    extra_bytes = row.get("extra_bytes")
    if extra_bytes is not None and declared_bytes is not None:
        row["declared_bytes"] = declared_bytes
        if extra_bytes > declared_bytes:
            row["check"] += "; more extra bytes than declared"


def _figures(name: str, timed: Mapping[str, timing.Timing], limit_us: float) -> Row:
    """Return a row's times and ratios; a flushed time below the limit is refused."""
    own = timed[name]
    if name != COPY and own.method == "events" and own.median_us < limit_us:
        return {
            "check": f"{own.median_us:.1f} µs is below the limit of {limit_us:.1f} µs: "
            "the timing or the cost formula is wrong"
        }
    row: Row = {
        "time_us": own.median_us,
        "low_us": own.low_us,
        "high_us": own.high_us,
        "method": own.method,
        "clock_mhz": own.clock_mhz,
        "of_copy": timed[COPY].median_us / own.median_us,
    }
    if name != COPY:  # which has nothing to compute
        row |= {"limit_us": limit_us, "share": limit_us / own.median_us}
    if name != OURS and OURS in timed:
        verdict, ratio = timing.difference(timed[OURS], own)
        row |= {"ratio": 1 / ratio, "nearlight_is": verdict}
    return row


def _host_rows(
    op: Op, machine: Machine, peers: Sequence[str], case: Case, direction: str
) -> Iterator[Row]:
    """Yield what a call costs the CPU, on an input so small that the GPU waits."""
    inputs = make_inputs(op, Trial(case), machine.device)
    expected, _ = expected_of(op, inputs, Trial(case), direction == "forward_backward")
    upstream = expected.upstream if direction == "forward_backward" else None
    for name, function, missing in implementations(op, peers):
        row: Row = {"case": f"host cost, {case.name}", "direction": direction}
        row |= {"implementation": name, "check": missing}
        if function is not None:
            try:
                timed = timed_call(function, cloned(inputs), upstream)
                row["host_us"] = timing.host_cost_us(timed)
            except Exception as error:  # as above
                row["check"] = f"raised {type(error).__name__}: {str(error)[:120]}"
        yield row


def _copy_calls(num_bytes: int, device: str) -> list[Callable[[], Any]]:
    """Return copies that move as many bytes, read plus written, as the op must."""
    half = max(num_bytes // 2, 1)
    source = torch.randint(0, 255, (half,), dtype=torch.uint8, device=device)
    return [partial(torch.empty_like(source).copy_, source) for _ in range(2)]


def _extra_bytes(work: Work, machine: Machine) -> tuple[int | None, bool]:
    """Return the peak of device memory beyond what was given and what is returned.

    And whether what is returned lies in what was given. On a CPU the peak is not known.
    """
    if machine.device != "cuda":
        return None, False
    inputs = work.sets[0]
    given = [*inputs.values(), *(work.upstream or ())]
    return extra_bytes(lambda: compute(work.function, inputs, work.upstream), given, machine.device)

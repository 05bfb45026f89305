"""A report as one self-contained HTML page of at most 500 kB."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from nearlight.core.hardware import Gpu, find_gpu
from nearlight.core.report import Report, State, gib, write_aside
from nearlight.profiler.memory import OWNERS
from nearlight.profiler.pages import charts
from nearlight.profiler.pages.terminal import cell, merged, remarks, table_keys

TEMPLATE = Path(__file__).parent / "page.html"
TOP_OPS, TOP_TENSORS, TOP_PROOF_ROWS = 25, 12, 12
MAX_BYTES = 500_000


def render(report: Report) -> str:
    """Return the page of a report that has a state before."""
    if report.before is None:
        raise ValueError(f"a {report.verb} report has no step to draw; use --json")
    gpu = find_gpu(report.gpu)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["gib"] = gib
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        gpu=gpu,
        row_keys=table_keys(report),
        cell=cell,
        states=[state for state in (report.before, report.after) if state],
        roofline=charts.roofline(report.before, report.after, gpu, _roof_pipe(report.before, gpu)),
        memory=charts.memory(report.before, report.after, gpu),
        owners=[owner for owner in OWNERS if _owns(report, owner)],
        ops=merged((report.after or report.before).ops)[:TOP_OPS],
        remarks=remarks(report.after or report.before),
        tensors=(report.before.peak_tensors)[:TOP_TENSORS],
        proof_rows=report.proof.rows[:TOP_PROOF_ROWS] if report.proof else [],
    )
    assert len(page.encode()) <= MAX_BYTES, f"the page has {len(page.encode())} bytes"
    return page


def save_html(report: Report, path: str | Path) -> None:
    """Write the page of an optimize or predict report; no half page is ever left.

    Args:
        report: what to draw.
        path: file to write.

    Raises:
        ValueError: a report without a step (doctor, check, ...).

    Example:
        >>> nearlight.save_html(nearlight.optimize(model, batch), "out.html")  # doctest: +SKIP
    """
    write_aside(path, render(report))


def _owns(report: Report, owner: str) -> bool:
    states: list[State | None] = [report.before, report.after]
    return any(state is not None and state.memory.get(owner, 0) > 0 for state in states)


def _roof_pipe(state: State, gpu: Gpu) -> str:
    """Return the pipe whose roof is drawn: that of most flops, in a step without any the half's."""
    return state.pipe or ("bf16" if "bf16" in gpu.peaks_tflops else "fp16")

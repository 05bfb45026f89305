"""A report as one self-contained HTML page of at most 500 kB."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from nearlight.core.hardware import Gpu, find_gpu
from nearlight.core.report import Report, State, write_aside
from nearlight.profiler.pages import charts
from nearlight.profiler.pages.terminal import gib, merged

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
        states=[state for state in (report.before, report.after) if state],
        roofline=charts.roofline(report.before, report.after, gpu, _main_pipe(report, gpu)),
        memory=charts.memory(report.before, report.after, gpu),
        owners=[owner for owner in charts.OWNERS if _owns(report, owner)],
        ops=merged((report.after or report.before).ops)[:TOP_OPS],
        tensors=(report.before.peak_tensors)[:TOP_TENSORS],
        proof_rows=report.proof.rows[:TOP_PROOF_ROWS] if report.proof else [],
    )
    assert len(page.encode()) <= MAX_BYTES, f"the page has {len(page.encode())} bytes"
    return page


def save_html(report: Report, path: str | Path) -> None:
    """Write the page; aside first, then renamed, so that no half page stays."""
    write_aside(path, render(report))


def _owns(report: Report, owner: str) -> bool:
    states: list[State | None] = [report.before, report.after]
    return any(state is not None and state.memory.get(owner, 0) > 0 for state in states)


def _main_pipe(report: Report, gpu: Gpu) -> str:
    """Return the pipe whose roof is drawn: the one the setup names, else the fastest it has."""
    for word, pipe in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")):
        if word in report.setup and pipe in gpu.peaks_tflops:
            return pipe
    return "bf16" if "bf16" in gpu.peaks_tflops else "fp16"

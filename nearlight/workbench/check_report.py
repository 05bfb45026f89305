"""What `check` answers, without torch: a row per property, and the report of all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nearlight.core.report import Proof, Report

NOT_APPLICABLE = "not applicable"
# Parts of a row that stand only where they say something.
_RARE = ("reproduce", "needs_gpu", "same_as")


@dataclass(frozen=True)
class Row:
    """What was found of one property.

    Attributes:
        number: place of the property in the list of the proof.
        property: its name.
        status: "passed", "failed" or "not applicable".
        num_trials: inputs it was tried on.
        reason: how it is broken, why it says nothing, or what the op refuses; the cases, where
            they are few.
        reproduce: one line of Python that shows the failure again.
        seconds: how long it took.
        kernels: names of the kernels that were launched.
        needs_gpu: whether it is not applicable for want of a GPU.
        cause: what is wrong, which may be what is wrong in another row; "" where it is not known.
    """

    number: int
    property: str
    status: str
    num_trials: int
    reason: str
    reproduce: str
    seconds: float
    kernels: Sequence[str] = ()
    needs_gpu: bool = False
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.property}: {self.status} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class Header:
    """What is known of a check before its first row.

    Attributes:
        op: name of the op.
        source: what the command line takes to find it.
        quick: whether it is the quick check.
        device: "cpu" or "cuda".
        gpu: key of the GPU table, "" on a CPU.
        versions: of what the verdict depends on.
    """

    op: str
    source: str
    quick: bool
    device: str
    gpu: str
    versions: Mapping[str, str]


def as_report(header: Header, rows: Sequence[Row]) -> Report:
    """Return the report of a check: the verdict first, then what was launched, then the rows."""
    kernels = sorted({name for row in rows for name in row.kernels})
    failed = [row for row in rows if row.status == "failed"]
    first: dict[str, str] = {}  # by cause, the first property that it breaks
    for row in failed:
        first.setdefault(row.cause or row.property, row.property)
    judged = [row for row in rows if row.status != NOT_APPLICABLE]
    is_on_cpu = header.device == "cpu"
    num_elsewhere = sum(row.needs_gpu for row in rows) if is_on_cpu else 0
    is_not_run = bool(num_elsewhere) and not any(
        row.property == "values" and row.status != NOT_APPLICABLE for row in rows
    )
    answer = f"{header.op}: {'values not run; ' if is_not_run else ''}"
    answer += f"{len(judged) - len(failed)} of {len(judged)} properties hold"
    if num_elsewhere:
        answer += f", {num_elsewhere} need{'s' if num_elsewhere == 1 else ''} a GPU"
    if failed:
        answer += f"; broken: {', '.join(row.property for row in failed)}"
    what = ", ".join(kernels) or "no nearlight kernel: plain PyTorch code"
    if failed and not kernels:
        what = "no kernel that came back"
    method = f"{'interpreted' if is_on_cpu else 'on ' + header.device}; launched {what}"
    if is_not_run:
        method = f"compiled and read, values not run; kernels {', '.join(kernels) or 'unknown'}"
    return Report(
        verb="check",
        answer=answer,
        target=header.op,
        gpu=header.gpu,
        setup=f"{'quick' if header.quick else 'full'} check, {method}",
        versions=header.versions,
        proof=Proof(bool(judged) and not failed, (), method, is_not_run),
        rows=[_as_dict(row, first.get(row.cause, "")) for row in rows],
        next=failed[0].reproduce if failed else _next(header, is_not_run),
    )


def _next(header: Header, is_not_run: bool) -> str:
    target = shlex.quote(header.source)
    if is_not_run:
        return f"on a machine with a GPU: nearlight check {target} --device cuda"
    return f"nearlight {'inspect' if header.device == 'cpu' else 'bench'} {target}"


def broken(report: Report) -> list[str]:
    """Return each cause once, with the line that shows it, and what is as it; [] if all holds."""
    failed = [row for row in report.rows if row["status"] == "failed"]
    lines = [f"{r['property']}: as {r['same_as']}" if "same_as" in r else told(r) for r in failed]
    if not lines and not (report.proof and report.proof.passed):
        reasons = [f"{row['property']}: {row['reason']}" for row in report.rows]
        return ["no property could be judged here", *reasons]
    return lines


def told(row: Mapping[str, Any]) -> str:
    """Return how a failed property of a report is broken and the line that shows it."""
    return f"{row['property']}: {row['reason']}\n  {row.get('reproduce', '')}"


def _as_dict(row: Row, first: str) -> dict[str, Any]:
    # The rows of a table: what only few have is left out of the others.
    parts = {**asdict(row), "same_as": first if first != row.property else ""}
    untold = ("kernels", "cause")
    return {k: v for k, v in parts.items() if k not in untold and (v or k not in _RARE)}

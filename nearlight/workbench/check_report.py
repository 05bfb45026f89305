"""What `check` answers, without torch: a row per property, and the report of all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nearlight.core.report import Proof, Report

NOT_APPLICABLE = "not applicable"
# Of each property that would launch CUDA C++ on CPU tensors; the proof says the rest once.
ON_A_GPU = "needs a GPU"
_ON_A_GPU_ALONE = "CUDA C++ runs on a GPU alone"
# Parts of a row that stand only where they say something.
_RARE = ("reproduce", "needs_gpu", "same_as")
# What a failed row says first where a call of the op did not come back.
_LOST = re.compile(r"raised |ended |was killed |did not finish ")
_NOT_RUN = "nothing was run"


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
        compiled: names of those that were compiled and read alone.
        needs_gpu: whether it is not applicable for want of a GPU.
        cause: what is wrong, which may be what is wrong in another row; "" where it is not known.
        named_by: the property that names what is wrong, where another one is known to.
    """

    number: int
    property: str
    status: str
    num_trials: int
    reason: str
    reproduce: str
    seconds: float
    kernels: Sequence[str] = ()
    compiled: Sequence[str] = ()
    needs_gpu: bool = False
    cause: str = ""
    named_by: str = ""

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
        only: names of the properties asked for, where not all are.
    """

    op: str
    source: str
    quick: bool
    device: str
    gpu: str
    versions: Mapping[str, str]
    only: Sequence[str] = ()


def as_report(header: Header, rows: Sequence[Row]) -> Report:
    """Return the report of a check: the verdict first, then what was launched, then the rows."""
    failed = [row for row in rows if row.status == "failed"]
    judged = [row for row in rows if row.status != NOT_APPLICABLE]
    waiting = [row for row in rows if row.needs_gpu and header.device == "cpu"]
    is_lacking = any(header.only or row.property == "values" for row in waiting)
    is_partial = not judged or (not failed and is_lacking)
    first = first_of_cause(failed)
    reproduce = next((row.reproduce for row in failed if first[row.property] == row.property), "")
    scope = f"check of {', '.join(header.only)} alone" if header.only else "full check"
    return Report(
        verb="check",
        answer=f"{header.op}: {_answer(rows, judged, failed, waiting)}",
        target=header.op,
        gpu=header.gpu,
        setup=f"{'quick check' if header.quick else scope}, {_kernels(header, rows)}",
        versions=header.versions,
        proof=Proof(bool(judged) and not failed, (), _method(header, rows, waiting), is_partial),
        rows=[_as_dict(row, first.get(row.property, "")) for row in rows],
        next=reproduce or _next(header, bool(waiting) and is_partial),
    )


def _answer(
    rows: Sequence[Row], judged: Sequence[Row], failed: Sequence[Row], waiting: Sequence[Row]
) -> str:
    verb = "needs" if len(waiting) == 1 else "need"
    if not judged:
        whose, why = (waiting, f"{verb} a GPU") if waiting else (rows, NOT_APPLICABLE)
        return f"nothing is proved here: {', '.join(row.property for row in whose)} {why}"
    is_not_run = any(row.property == "values" for row in waiting)
    answer = "values not run; " if is_not_run else ""
    answer += f"{len(judged) - len(failed)} of {len(judged)} properties hold"
    if waiting:
        answer += f", {len(waiting)} {verb} a GPU"
    return answer + (f"; broken: {', '.join(row.property for row in failed)}" if failed else "")


def first_of_cause(failed: Sequence[Row]) -> dict[str, str]:
    """Return for each broken property the one that names its cause, or is the first of it."""
    first: dict[str, str] = {}  # by cause
    return {
        row.property: row.named_by or first.setdefault(row.cause or row.property, row.property)
        for row in failed
    }


def _kernels(header: Header, rows: Sequence[Row]) -> str:
    """Say which kernels ran and which were compiled alone; of a template its name."""
    launched = {name.partition("<")[0] for row in rows for name in row.kernels}
    compiled = {name.partition("<")[0] for row in rows for name in row.compiled} - launched
    read = f"compiled and read, not run: {', '.join(sorted(compiled))}"
    if compiled and not launched:
        return read
    what = ", ".join(sorted(launched)) or "no nearlight kernel: plain PyTorch code"
    if not launched and any(row.status == "failed" and _LOST.match(row.reason) for row in rows):
        what = "no kernel that came back"
    elif not launched and not any(row.num_trials for row in rows):
        return _NOT_RUN
    return f"{_how(header)}; launched {what}" + (f"; {read}" if compiled else "")


def _how(header: Header) -> str:
    return "interpreted" if header.device == "cpu" else f"on {header.device}"


def _method(header: Header, rows: Sequence[Row], waiting: Sequence[Row]) -> str:
    """Say how what is proved was proved, and what was not."""
    is_run = any(row.kernels for row in rows) or not any(row.compiled for row in rows)
    parts = [_how(header) if is_run else "compiled and read, not run"]
    if is_run and not any(row.num_trials or row.status == "failed" for row in rows):
        parts = [_NOT_RUN]
    if header.only:
        parts.insert(0, f"{', '.join(header.only)} alone")
    if any(row.reason == ON_A_GPU for row in waiting):
        parts.append(_ON_A_GPU_ALONE)
    if waiting:
        parts.append(f"not proved here: {', '.join(row.property for row in waiting)}")
    return "; ".join(parts)


def _next(header: Header, is_elsewhere: bool) -> str:
    target = shlex.quote(header.source)
    on_gpu = f"nearlight check {target} --device cuda"
    if is_elsewhere:
        return f"on a machine with a GPU: {on_gpu}"
    if header.quick or header.only:
        return on_gpu if header.device != "cpu" else f"nearlight check {target}"
    if header.device != "cpu":
        return f"nearlight bench {target}"
    return f"nearlight inspect {target}  # then, with a GPU: nearlight bench {target}"


def broken(report: Report) -> list[str]:
    """Return each cause once, with the line that shows it, and what is as it; [] if all holds."""
    failed = [row for row in report.rows if row["status"] == "failed"]
    lines = [f"{r['property']}: as {r['same_as']}" if "same_as" in r else told(r) for r in failed]
    is_told = any(row["status"] == "passed" or row.get("needs_gpu") for row in report.rows)
    if not lines and not is_told:
        reasons = [f"{row['property']}: {row['reason']}" for row in report.rows]
        return ["no property could be judged here", *reasons]
    return lines


def told(row: Mapping[str, Any]) -> str:
    """Return how a failed property of a report is broken and the line that shows it."""
    return f"{row['property']}: {row['reason']}\n  {row.get('reproduce', '')}"


def _as_dict(row: Row, first: str) -> dict[str, Any]:
    # The rows of a table: what only few have is left out of the others.
    parts = {**asdict(row), "same_as": first if first != row.property else ""}
    untold = ("kernels", "compiled", "cause", "named_by")
    return {k: v for k, v in parts.items() if k not in untold and (v or k not in _RARE)}

"""What `bench` answers: one line over all rows, and the rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from nearlight.core.hardware import Gpu
from nearlight.core.op import Op
from nearlight.core.report import Proof, Report

OURS, COPY = "nearlight", "copy"
HOW = "results held to the reference, before the timing and after it on new values"

Row = dict[str, Any]


def report_of(op: Op, gpu: Gpu, rows: list[Row], versions: Mapping[str, str]) -> Report:
    """Return the report of a run's rows; its answer counts lost rows like won ones."""
    ours = [row for row in rows if row["implementation"] == OURS and "host_us" not in row]
    shares = [row["share"] for row in ours if "share" in row]
    unproved = [row for row in ours if "share" not in row]
    parts = []
    if shares:
        parts.append(f"share of the limit {min(shares):.2f} to {max(shares):.2f}")
    for name in dict.fromkeys(row["implementation"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["implementation"] == name and "ratio" in row]
        if ratios and name != COPY:
            lost = sum(ratio < 1 for ratio in ratios)
            parts.append(f"{statistics.median(ratios):.2f} × {name} (slower in {lost})")
    if num_beyond := sum("more extra bytes" in row["check"] for row in ours):
        parts.append(f"more extra bytes than declared in {num_beyond}")
    if unproved:
        parts.append(f"{len(unproved)} of {len(ours)} without a speed: {unproved[0]['check']}")
    return Report(
        verb="bench",
        answer=f"{op.name} on {gpu.name}: {', '.join(parts)}",
        target=op.name,
        gpu=gpu.key,
        setup="inputs rotated, caches flushed, interleaved, medians; "
        "ratio = peer's time ÷ ours, with ! where the peer's results are wrong",
        versions=versions,
        proof=Proof(bool(ours) and not unproved, (), HOW),
        rows=rows,
        next=f"next: nearlight check {op.name}",
    )

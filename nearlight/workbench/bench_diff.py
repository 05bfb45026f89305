"""`bench --diff A B`: what became slower from one result to another, as a guard of a user's CI."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearlight.core.errors import BadInput, one_line
from nearlight.core.report import Proof, Report

OURS = "nearlight"
SLOWER, NO_SPEED = "slower", "no speed in B"
# Of what changes between two runs beside the op; date and commit always do.
NAMED_VERSIONS = ("nearlight", "torch", "triton", "python", "driver", "device")

Rows = dict[tuple[str, str], Mapping[str, Any]]


def diff(before: str | Path, after: str | Path, max_loss: str | float | None = None) -> Report:
    """Compare the op's own times in two results of `bench` on one kind of GPU.

    A row is a loss where B is slower than A by more than `max_loss` and beyond both spreads (B's
    20th percentile lies above A's 80th), or has no speed any more. Host costs have no spread: they
    are shown and not judged.

    Args:
        before: A, the JSON of an earlier run.
        after: B, of a later one.
        max_loss: "2%" or 0.02; None shows the rows and judges nothing.

    Returns:
        A report with a row per case and direction; `proof.passed` says that nothing is lost,
        where that was asked.

    Raises:
        BadInput: a file that is no result of `bench`, two ops, two kinds of GPU, no row in
            common, or a loss that is none.

    Example:
        >>> from nearlight.workbench.bench_diff import diff
        >>> diff("main.json", "branch.json", max_loss="2%").answer  # doctest: +SKIP
        '0 of 14 rows are slower by more than 2%'
    """
    allowed = None if max_loss is None else parse_loss(max_loss)
    a, b = _load(before), _load(after)
    for what in ("target", "gpu"):
        if a[what] != b[what]:
            raise BadInput(
                f"{before} is of {what} {a[what]} and {after} of {b[what]}: their times say "
                "nothing of each other"
            )
    rows_a, rows_b = _ours(a), _ours(b)
    common = [key for key in rows_a if key in rows_b]
    if not common:
        raise BadInput(f"{before} and {after} have no case and direction in common")
    rows = [
        {"case": key[0], "direction": key[1], **_compare(rows_a[key], rows_b[key], allowed or 0.0)}
        for key in common
    ]
    for name, own, other in (("A", rows_a, rows_b), ("B", rows_b, rows_a)):
        rows += [
            {"case": case, "direction": direction, "b_is": f"only in {name}"}
            for case, direction in own
            if (case, direction) not in other
        ]
    lost = [row for row in rows if row["b_is"] in (SLOWER, NO_SPEED)]
    return Report(
        verb="bench",
        answer=f"{b['target']}: {_answer(rows, len(common), lost, allowed)}",
        target=b["target"],
        gpu=b["gpu"],
        setup=f"A = {before}, B = {after}; {_changed_versions(a, b)}; ratio = B ÷ A",
        versions=b["versions"],
        proof=None if allowed is None else Proof(not lost, (), f"at most {allowed:.3g} slower"),
        rows=rows,
        next=f"next: nearlight check {b['target']}" if lost else "",
    )


def parse_loss(text: str | float) -> float:
    """Return a share from "2%" or "0.02"; BadInput for anything else."""
    try:
        value = float(str(text).removesuffix("%")) / (100 if str(text).endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise BadInput(f"--max-loss {text}: allowed are 2% or 0.02, from 0 to less than 100%")
    return value


def _load(path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {one_line(error)}") from None
    is_bench = isinstance(found, dict) and found.get("verb") == "bench"
    if not is_bench or not any("implementation" in row for row in found.get("rows", ())):
        raise BadInput(f"{path} is no result of `nearlight bench OP --json PATH`")
    return found


def _ours(result: Mapping[str, Any]) -> Rows:
    return {
        (row["case"], row["direction"]): row
        for row in result["rows"]
        if row["implementation"] == OURS
    }


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], allowed: float) -> dict[str, Any]:
    key = "host_us" if "host_us" in a or "host_us" in b else "time_us"
    if key not in a or key not in b:
        verdict = NO_SPEED if key in a else "no speed in A"
        return {"a_us": a.get(key), "b_us": b.get(key), "b_is": verdict, "check": b["check"]}
    ratio = b[key] / a[key]
    found = {"a_us": a[key], "b_us": b[key], "ratio": ratio}
    if key == "host_us":
        return {**found, "b_is": "not judged"}
    if ratio > 1 + allowed and b["low_us"] > a["high_us"]:
        return {**found, "b_is": SLOWER}
    is_faster = ratio < 1 - allowed and b["high_us"] < a["low_us"]
    return {**found, "b_is": "faster" if is_faster else "no difference"}


def _answer(
    rows: list[dict[str, Any]], num_common: int, lost: list[dict[str, Any]], allowed: float | None
) -> str:
    if allowed is None:
        ratios = [row["ratio"] for row in rows if "ratio" in row and row["b_is"] != "not judged"]
        middle = f", median B ÷ A {statistics.median(ratios):.3f}" if ratios else ""
        text = f"{len(lost)} of {num_common} rows are slower{middle}"
    else:
        text = f"{len(lost)} of {num_common} rows are slower by more than {allowed * 100:.3g}%"
    if lost:
        named = (
            f"{row['case']} {row['direction']} "
            + (f"{row['ratio']:.2f} ×" if "ratio" in row else f"has no speed ({row['check']})")
            for row in lost
        )
        text += f": {', '.join(named)}"
    for name in ("A", "B"):
        if num := sum(row["b_is"] == f"only in {name}" for row in rows):
            text += f"; {num} only in {name}"
    return text


def _changed_versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    changed = [
        f"{name} {a['versions'].get(name)} → {b['versions'].get(name)}"
        for name in NAMED_VERSIONS
        if a["versions"].get(name) != b["versions"].get(name)
    ]
    return ", ".join(changed) or "the same versions"

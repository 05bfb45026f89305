"""Rows of `bench` as a narrow table: one per case and direction, peers as columns of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OURS, COPY = "nearlight", "copy"
_DIRECTIONS = {"forward": "fwd", "forward_backward": "fwd+bwd"}
# Marks the ratio of a peer whose results are outside of the tolerance.
WRONG = "!"


def by_case(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row of texts per case and direction; ratios are a peer's time over ours.

    Args:
        rows: one per case, direction and implementation.
    """
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        group = groups.setdefault((row["case"], row["direction"]), {})
        group[row["implementation"]] = row
    return [
        _row(case, _DIRECTIONS.get(direction, direction), group)
        for (case, direction), group in groups.items()
    ]


def _row(case: str, direction: str, group: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    ours = group.get(OURS, {})
    found = {"case": case, "": direction, "µs": "none", "share": ""}
    if (time_us := _time_us(ours)) is not None:
        found["µs"] = f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.1f}"
    if "share" in ours:
        found["share"] = f"{ours['share']:.0%}"
    for name, row in group.items():
        if name not in (OURS, COPY):
            found[f"× {name}"] = _ratio(row, time_us)
    return found


def _time_us(row: Mapping[str, Any]) -> float | None:
    return row.get("time_us", row.get("host_us"))


def _ratio(row: Mapping[str, Any], ours_us: float | None) -> str:
    theirs_us = _time_us(row)
    if ours_us is None or theirs_us is None:
        return "–"
    mark = WRONG if row["check"].startswith("wrong") else ""
    return f"{row.get('ratio', theirs_us / ours_us):.2f}{mark}"

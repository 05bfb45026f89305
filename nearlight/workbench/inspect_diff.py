"""`inspect --diff A B`: two kernels side by side on one arch, with what differs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from nearlight.core.errors import BadInput
from nearlight.core.report import Report
from nearlight.core.versions import versions
from nearlight.workbench.inspect_target import Target

Row = dict[str, Any]

# Differences that the answer names; all stand in the rows.
_NAMED = 5


def diff_report(targets: Sequence[Target], arch: str, rows: Sequence[Sequence[Row]]) -> Report:
    """Return the report on two targets: a pair of rows for each kernel that both have.

    Args:
        targets: two.
        arch: both were compiled for it.
        rows: of each target's kernels.

    Raises:
        BadInput: none of the kernels of one has its like in the other.
    """
    both: list[Row] = []
    answers = []
    names = _names(targets)
    for left, right in _pairs(targets, rows):
        kernels = dict.fromkeys((left["kernel"], right["kernel"]))
        label = " → ".join(kernels)
        both += [{**row, "kernel": label, "target": name}
                 for row, name in zip((left, right), names, strict=True)]  # fmt: skip
        found = [f"{key.replace('_', ' ')} {_text(left.get(key))} → {_text(right.get(key))}"
                 for key in dict.fromkeys((*left, *right))
                 if key != "kernel" and left.get(key) != right.get(key)]  # fmt: skip
        more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
        answers.append(f"{label}: {', '.join(found[:_NAMED] + more) or 'no difference'}")
    second = shlex.quote(targets[1].name)
    return Report(
        verb="inspect",
        answer=f"on {arch}, {'; '.join(answers)}",
        target=" and ".join(names),
        setup=f"{names[0]} → {names[1]}, both compiled for {arch}",
        versions=versions(),
        rows=both,
        next=f"what it is worth: nearlight bench {second}"
        if targets[1].op
        else f"on each arch: nearlight inspect {second}",
    )


def _names(targets: Sequence[Target]) -> list[str]:
    first, second = (target.name for target in targets)
    return [first, second if second != first else f"{second} again"]


def _pairs(targets: Sequence[Target], rows: Sequence[Sequence[Row]]) -> Iterator[tuple[Row, Row]]:
    """Yield the rows of kernels that belong together: the only ones, or those of one name."""
    left, right = rows
    if len(left) == len(right) == 1:
        yield left[0], right[0]
        return
    by_name = {row["kernel"]: row for row in right}
    shared = [(row, by_name[row["kernel"]]) for row in left if row["kernel"] in by_name]
    if not shared:
        lists = "; ".join(
            f"{target.name} has {', '.join({row['kernel'].split()[0]: 0 for row in each})}"
            for target, each in zip(targets, rows, strict=True)
        )
        raise BadInput(f"no kernel stands in both, name one of each: {lists}")
    yield from shared


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0%}"
    return "none" if value is None else str(value)

"""`inspect --diff A B`: two kernels side by side on one arch, with what differs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nearlight.core.errors import BadInput
from nearlight.core.report import Report
from nearlight.core.versions import versions
from nearlight.workbench.inspect_target import Target

Row = dict[str, Any]

# Differences that the answer names; all stand in the rows.
_NAMED = 5
_CPP_TYPES = {"__half": "fp16", "__nv_bfloat16": "bf16", "float": "fp32", "double": "fp64"}


def diff_report(
    targets: Sequence[Target],
    arch: str,
    rows: Sequence[Sequence[Row]],
    lacking: Sequence[str] = ("", ""),
) -> Report:
    """Return the report on two targets: a pair of rows for each kernel that both have.

    Args:
        targets: two.
        arch: both were compiled for it.
        rows: of each target's kernels.
        lacking: options that would tell each target's occupancy, "" where it is known.

    Raises:
        BadInput: none of the kernels of one has its like in the other.
    """
    both: list[Row] = []
    answers = []
    names = _names(targets)
    pairs = _pairs(targets, rows)
    for left, right in pairs:
        kernels = dict.fromkeys((left["kernel"], right["kernel"]))
        label = " → ".join(kernels)
        both += [{**row, "kernel": label, "target": name}
                 for row, name in zip((left, right), names, strict=True)]  # fmt: skip
        found = [f"{key.replace('_', ' ')} {_text(left.get(key))} → {_text(right.get(key))}"
                 for key in dict.fromkeys((*left, *right))
                 if key != "kernel" and left.get(key) != right.get(key)]  # fmt: skip
        more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
        answers.append(f"{label}: {', '.join(found[:_NAMED] + more) or 'no difference'}")
    setup = f"{names[0]} → {names[1]}, both compiled for {arch}"
    for side, name in enumerate(names):
        paired = [pair[side] for pair in pairs]
        if alone := [_called(row) for row in rows[side] if row not in paired]:
            setup += f"; in {name} alone: {', '.join(alone)}"
        if lacking[side]:
            setup += f"; for the occupancy say what {name} is launched with: {lacking[side]}"
    return Report(
        verb="inspect",
        answer=f"on {arch}, {'; '.join(answers)}",
        target=" and ".join(names),
        setup=setup,
        versions=versions(),
        rows=both,
        next=f"what it is worth, with a GPU: nearlight bench {targets[1].pasted}"
        if targets[1].op
        else f"on each arch: nearlight inspect {targets[1].pasted}",
    )


def _names(targets: Sequence[Target]) -> list[str]:
    first, second = (target.name for target in targets)
    return [first, second if second != first else f"{second} again"]


def _pairs(targets: Sequence[Target], rows: Sequence[Sequence[Row]]) -> list[tuple[Row, Row]]:
    """Return the rows of kernels that belong together: of one name, or the only ones left."""
    found: list[tuple[Row, Row]] = []
    left, right = map(list, rows)
    for key in (str, _typed_stem, _stem, lambda label: ""):
        for name in dict.fromkeys(key(row["kernel"]) for row in left):
            mine, theirs = ([r for r in each if key(r["kernel"]) == name] for each in (left, right))
            if len(mine) == len(theirs) and (name or len(mine) == 1):
                found += zip(mine, theirs, strict=True)
                left = [row for row in left if row not in mine]
                right = [row for row in right if row not in theirs]
    if not found:
        lists = "; ".join(
            f"{target.name} has {', '.join(dict.fromkeys(_called(row) for row in each))}"
            for target, each in zip(targets, rows, strict=True)
        )
        raise BadInput(f"no kernel stands in both, name one of each: {lists}")
    return sorted(found, key=lambda pair: rows[0].index(pair[0]))


def _called(row: Row) -> str:
    """Return what a kernel's target is named by: "f" of "f bf16 #2", "f<a, b>" as it stands."""
    match = re.match(r"[^\s<(]+(?:[<(].*[>)])?", row["kernel"])
    return match[0] if match else row["kernel"]


def _stem(label: str) -> str:
    """Return what kernels of two languages share: "f" of "_f_kernel bf16" and "a::f<b>"."""
    match = re.match(r"(?:\w+::)*_*([^\s<(]+?)(?:_kernel)?(?=[\s<(]|$)", label)
    return match[1] if match else label


def _typed_stem(label: str) -> str:
    """Return the stem and the first type by Triton's name: "f fp32" of "f<float, float>"."""
    match = re.search(r"[\s<(]([\w:]+)", label)
    return f"{_stem(label)} {_CPP_TYPES.get(match[1], match[1]) if match else ''}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0%}"
    return "none" if value is None else str(value)

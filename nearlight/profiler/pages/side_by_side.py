"""Rows of a report as one narrow table per kernel: a line per quantity, a column per arch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nearlight.core.report import Report

# What a row is called by; all else is a quantity.
_NAMES = ("kernel", "arch", "target")


def tables(report: Report) -> Iterator[Text | Table]:
    """Yield a title and a table for each kernel of a report's rows, without what is 0 everywhere.

    Args:
        report: its rows have a "kernel", and an "arch" or "target" that names their column.
    """
    for kernel in dict.fromkeys(row["kernel"] for row in report.rows):
        rows = [row for row in report.rows if row["kernel"] == kernel]
        yield Text(kernel, style="bold")  # not the table's own title, which is as narrow as it
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in _headings(rows):
            table.add_column(escape(name), justify="right", overflow="fold")
        for key in dict.fromkeys(key for row in rows for key in row if key not in _NAMES):
            if any(row.get(key) for row in rows):
                table.add_row(key.replace("_", " "), *(escape(_cell(key, row)) for row in rows))
        yield table


def _headings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the least that tells the rows apart: files without shared folders, or kernels."""
    names = [row.get("target", row["arch"]) for row in rows]
    files = [name.partition(":")[0] for name in names]
    if len(set(files)) < len(set(names)):  # the title has no file, so that one is not missed
        rests = [name.partition(":")[2] for name in names]
        return rests if all(rests) else names
    short = [file.rpartition("/")[2] for file in files]
    if len(set(short)) == len(set(files)):
        return short
    parts = [file.split("/") for file in files]
    while min(map(len, parts)) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    return ["/".join(part) for part in parts]


def _cell(key: str, row: Mapping[str, Any]) -> str:
    value = row.get(key, "")
    if isinstance(value, float):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else str(value)

"""A report as terminal text: the answer first, the next step last."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nearlight.core.report import Finding, OpRow, Proof, Report, State

TOP_OPS = 8


def draw(report: Report, console: Console) -> None:
    """Print a report of any verb."""
    console.print(f"[bold]{escape(report.answer)}[/bold]", soft_wrap=True)
    if report.setup:
        console.print(escape(report.setup), style="dim", soft_wrap=True)
    if report.before:
        console.print()
        console.print(_states(report.before, report.after))
        console.print(_ops(report.after or report.before))
    if report.findings:
        console.print()
        for number, finding in enumerate(report.findings, 1):
            _finding(console, number, finding)
    if report.rows:
        console.print(_rows(report))
    if report.proof:
        console.print()
        _proof(console, report.proof)
    if report.next:
        console.print()
        console.print(escape(report.next), soft_wrap=True)


def gib(num_bytes: float) -> str:
    """Return bytes as text in GiB, or in MiB below one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            escape(column), justify="left" if column in ("", "op", "module") else "right"
        )
    return table


def _states(before: State, after: State | None) -> Table:
    table = _table("", f"before ({before.mode})", *([f"after ({after.mode})"] if after else []))
    states = [state for state in (before, after) if state]
    table.add_row("step", *(_with_interval(state, "step_ms", "ms") for state in states))
    if before.tokens_per_s is not None:
        table.add_row("tokens/s", *(f"{state.tokens_per_s or 0:,.0f}" for state in states))
    elif before.samples_per_s is not None:
        table.add_row("samples/s", *(f"{state.samples_per_s or 0:,.1f}" for state in states))
    table.add_row("peak memory", *(gib(state.peak_bytes) for state in states))
    table.add_row(
        "share of the limit", *(f"{state.share:.0%} of {state.limit_ms:.1f} ms" for state in states)
    )
    for owner in before.memory:
        table.add_row(f"  {owner}", *(gib(state.memory.get(owner, 0)) for state in states))
    return table


def _with_interval(state: State, key: str, unit: str) -> str:
    value = getattr(state, key)
    figure = state.figures.get(key)
    if figure is None or figure.low is None or figure.high is None:
        return f"{value:.2f} {unit}"
    return f"{value:.2f} {unit} ({figure.low:.1f} to {figure.high:.1f})"


def _ops(state: State) -> Table:
    table = _table("op", "module", "calls", "ms", "limit ms", "share", "bound")
    for row in merged(state.ops)[:TOP_OPS]:
        share = "" if row.share is None else f"{row.share:.0%}"
        table.add_row(
            escape(row.name),
            escape(row.module),
            str(row.calls),
            f"{row.time_ms:.2f}",
            f"{row.limit_ms:.2f}",
            share,
            row.bound,
        )
    return table


def merged(rows: Iterable[OpRow]) -> list[OpRow]:
    """Merge rows of the same op in repeated layers ("layers.0.mlp", "layers.1.mlp", ...)."""
    groups: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        parts = ("*" if part.isdigit() else part for part in row.module.split("."))
        groups.setdefault((row.name, ".".join(parts), row.bound), []).append(row)
    result = []
    for (name, module, bound), group in groups.items():
        time_ms = sum(row.time_ms for row in group)
        limit_ms = sum(row.limit_ms for row in group)
        known = all(row.share is not None for row in group) and time_ms > 0
        result.append(
            OpRow(
                name,
                module,
                sum(row.calls for row in group),
                time_ms,
                limit_ms,
                limit_ms / time_ms if known else None,
                bound,
                sum(row.flops for row in group),
                sum(row.bytes for row in group),
            )
        )
    return sorted(result, key=lambda row: -row.time_ms)


def _finding(console: Console, number: int, finding: Finding) -> None:
    mark = "[green]applied[/green]" if finding.applied else "[yellow]open[/yellow]"
    gain = [f"{finding.gain_ms:.2f} ms"] if finding.gain_ms > 0 else []
    gain += [gib(finding.gain_bytes)] if finding.gain_bytes > 0 else []
    promise = f"promises {' and '.join(gain)}" if gain else "promises nothing by itself"
    console.print(
        f"{number}. [bold]{escape(finding.title)}[/bold] ({mark}, {promise})",
        soft_wrap=True,
        highlight=False,
    )
    for label, text in (
        ("", finding.evidence),
        ("why: ", finding.cause),
        ("fix: ", finding.fix),
        ("", finding.note),
        ("do: ", "" if finding.applied else finding.next_step),
    ):
        if text:
            console.print(f"   {label}{escape(text)}", soft_wrap=True, highlight=False)


def _proof(console: Console, proof: Proof) -> None:
    verdict = "[green]proof passed[/green]" if proof.passed else "[red]proof failed[/red]"
    console.print(f"{verdict}: {escape(proof.method)}", soft_wrap=True, highlight=False)
    if not proof.rows:
        return
    text = f"{len(proof.rows)} quantities"
    # What was not computed, or is no number, has no error; its reason is below.
    worst = next((row for row in proof.rows if "error" in row), None)
    if worst is not None:
        text += (
            f"; nearest to its limit: {escape(str(worst['name']))}, error {worst['error']:.1e} "
            f"(plain PyTorch {worst['plain_error']:.1e})"
        )
    console.print(f"   {text}", soft_wrap=True, highlight=False)
    for row in proof.rows:
        if not row["passed"]:
            console.print(
                f"   [red]{escape(str(row['name']))}[/red]: {escape(row['reason'])}",
                soft_wrap=True,
                highlight=False,
            )


def _rows(report: Report) -> Table:
    columns = list(dict.fromkeys(key for row in report.rows for key in row))
    table = _table(*columns)
    for column in table.columns:
        column.justify = "left"
    for row in report.rows:
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

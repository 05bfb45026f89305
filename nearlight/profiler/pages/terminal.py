"""A report as terminal text: the answer first, the next step last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from nearlight.core.report import Finding, OpRow, Proof, Report, State, gib
from nearlight.profiler.pages import ratios, side_by_side

TOP_OPS = 8
# Less of a step than this is not worth a line.
WORTH_A_REMARK = 0.005
# A cell of more characters may be broken into lines.
MAX_UNBROKEN = 26
_UNDRAWN = ("reproduce", "needs_gpu", "same_as", "out_of_date")
# Its place shall not depend on what it says.
_LAST = "reason"
_SHORT = {"number": "#", "num_trials": "trials"}


def draw(report: Report, console: Console, written: Sequence[str] = ()) -> None:
    """Print a report of any verb.

    Args:
        report: what to print.
        console: where.
        written: lines about files that were written, printed before the next step.
    """
    # One line for whoever reads it by program; a terminal would break it inside a word.
    console.print(f"[bold]{escape(report.answer)}[/bold]", soft_wrap=not console.is_terminal)
    if report.setup:
        console.print(escape(report.setup), style="dim")
    if report.rows and report.verb == "predict":
        console.print(_rows(report.rows))
    if report.verb == "inspect":
        console.print(*side_by_side.tables(report))
    if report.before:
        console.print()
        console.print(_states(report.before, report.after))
        console.print(_ops(report.after or report.before))
        for remark in remarks(report.after or report.before):
            console.print(escape(remark), highlight=False)
    if report.findings:
        console.print()
        for number, finding in enumerate(report.findings, 1):
            _finding(console, number, finding, of_step=report.before is not None)
    if report.rows and report.verb not in ("predict", "inspect"):
        is_bench = report.verb == "bench" and "implementation" in report.rows[0]
        rows = ratios.by_case(report.rows) if is_bench else report.rows
        console.print(_rows([_referred(row) for row in rows]))
    if report.proof:
        console.print()
        _proof(console, report.proof)
    shown = _shown_again(report.rows)
    is_shown = any(line.startswith(report.next) for line in shown)
    lines = [*written, *shown, *([report.next] if report.next and not is_shown else [])]
    if lines:
        console.print()
    for line in lines:
        console.print(escape(line), soft_wrap=True, highlight=False)


def remarks(state: State) -> list[str]:
    """Return what a reader must know to trust the times by op, one line each."""
    lines = []
    if (unmodelled := state.figures.get("unmodelled_ms")) is not None:
        share = unmodelled.value / state.step_ms
        if share > WORTH_A_REMARK:
            lines.append(
                f"{unmodelled.value:.2f} ms, {share:.1%} of the step, are ops without a cost model"
            )
    if beyond := [row for row in state.ops if row.remark]:
        time_ms = sum(row.time_ms for row in beyond)
        lines.append(f"{len(beyond)} rows, {time_ms:.2f} ms, have no share: {beyond[0].remark}")
    if (kernels := state.figures.get("kernel_ms")) is not None:
        beyond_ms = kernels.value - state.step_ms
        if beyond_ms > WORTH_A_REMARK * state.step_ms:
            lines.append(
                f"kernels of the profiled step add up to {kernels.value:.1f} ms, {beyond_ms:.1f} "
                "more than the step takes undisturbed: times by op are too long"
            )
    return lines


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
    table = _table("op", "module", "calls", "ms", "share", "bound")
    for row in merged(state.ops)[:TOP_OPS]:
        share = "" if row.share is None else f"{row.share:.0%}"
        name, module = short_names(row)
        calls = str(row.calls or "")
        table.add_row(escape(name), escape(module), calls, f"{row.time_ms:.2f}", share, row.bound)
    return table


def short_names(row: OpRow) -> tuple[str, str]:
    """Return op and module as a narrow table shows them: no namespace, repeated layers as "*"."""
    head, star, tail = row.module.rpartition("*.")
    return row.name.removeprefix("aten::"), f"*.{tail}" if star else head + tail


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


def _finding(console: Console, number: int, finding: Finding, of_step: bool) -> None:
    mark = "[green]applied[/green]" if finding.applied else "[yellow]open[/yellow]"
    gain = [f"{finding.gain_ms:.2f} ms"] if finding.gain_ms > 0 else []
    gain += [gib(finding.gain_bytes)] if finding.gain_bytes > 0 else []
    promise = f"promises {' and '.join(gain)}" if gain else "promises nothing by itself"
    title = f"[bold]{escape(finding.title)}[/bold]" + (f" ({mark}, {promise})" if of_step else "")
    console.print(f"{number}. {title}", highlight=False)
    for label, text in (
        ("", finding.evidence),
        ("why: ", finding.cause),
        ("fix: ", finding.fix),
        ("", finding.note),
        ("do: ", "" if finding.applied else finding.next_step),
    ):
        if text:
            console.print(
                Padding(f"{label}{escape(text)}", (0, 0, 0, 3), expand=False), highlight=False
            )


def _proof(console: Console, proof: Proof) -> None:
    color = {"passed": "green", "incomplete": "yellow", "failed": "red"}[proof.verdict]
    verdict = f"[{color}]proof {proof.verdict}[/{color}]"
    console.print(f"{verdict}: {escape(proof.method)}", highlight=False)
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
    console.print(Padding(text, (0, 0, 0, 3), expand=False), highlight=False)
    for row in proof.rows:
        if not row["passed"]:
            line = f"[red]{escape(str(row['name']))}[/red]: {escape(row['reason'])}"
            console.print(Padding(line, (0, 0, 0, 3), expand=False), highlight=False)


def _shown_again(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line of Python for each cause in the rows' order, marked where there are several."""
    causes = [row for row in rows if row.get("reproduce") and "same_as" not in row]
    if len(causes) < 2:
        return [str(row["reproduce"]) for row in causes]
    return [f"{row['reproduce']}  # {row['number']} {row['property']}" for row in causes]


def _referred(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row that has the cause of another with the name of that one as its reason."""
    return {**row, "reason": f"as {row['same_as']}"} if "same_as" in row else row


def _rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Draw rows with no column that is empty; the longest texts alone are broken, and come last."""
    texts = {
        key: [cell(key, row.get(key)) for row in rows]
        for key in dict.fromkeys(key for row in rows for key in row if key not in _UNDRAWN)
    }
    widths = {key: max(map(len, column)) for key, column in texts.items() if any(column)}
    order = sorted(widths, key=lambda k: (k == _LAST, widths[k] * (widths[k] > MAX_UNBROKEN)))
    table = _table(*(_SHORT.get(key) or key.removesuffix("_bytes").replace("_", " ")
                     for key in order))  # fmt: skip
    table.padding = (0, 1, 0, 0)
    for key, column in zip(order, table.columns, strict=True):
        column.justify = "left"
        column.no_wrap = widths[key] <= MAX_UNBROKEN
        column.overflow = "fold"  # of what is longer than its line nothing is cut away
    for line in zip(*(texts[key] for key in order), strict=True):
        table.add_row(*map(escape, line))
    return table


def table_keys(report: Report) -> list[str]:
    """Return the columns of a report's rows, in the order they first appear."""
    return list(dict.fromkeys(key for row in report.rows for key in row))


def cell(key: str, value: object) -> str:
    """Return a value of a report's row as text, in the unit that its key names."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if key.endswith("_bytes"):
            return gib(value)
        if key.endswith("_per_s"):
            return f"{value:,.0f}"
        if key == "share":
            return f"{value:.0%}"
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return str(value)

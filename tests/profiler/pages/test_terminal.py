import io
import re

import pytest
from rich.console import Console

from nearlight.core.report import Figure, Finding, OpRow, Proof, Report, State
from nearlight.profiler.pages.terminal import TOP_OPS, draw, merged


def row(name="aten::mm", module="model.layers.0.mlp", time_ms=2.0, limit_ms=1.0, **others):
    values = {"calls": 1, "bound": "compute", "flops": 10, "bytes": 20} | others
    share = values.pop("share", limit_ms / time_ms)
    return OpRow(name, module, time_ms=time_ms, limit_ms=limit_ms, share=share, **values)


def state(step_ms, **others):
    values = {
        "mode": "predicted", "tokens_per_s": 16384.0, "samples_per_s": 8.0,
        "peak_bytes": 3 * 2**30, "limit_ms": 20.0, "share": 20.0 / step_ms, "ops": [row()],
        "memory": {"parameters": 2**30, "activations": 2**31},
        "figures": {"step_ms": Figure(step_ms, "ms", "predicted", "s", step_ms - 5, step_ms + 5)},
    }  # fmt: skip
    return State(step_ms=step_ms, **values | others)


@pytest.fixture
def report():
    return Report(
        verb="optimize",
        answer="tiny on h200: 61.2 → 44.8 ms a step",
        setup="bf16, fused AdamW",
        before=state(61.2),
        after=state(44.8, peak_bytes=512 * 2**20),
        findings=[
            Finding("61 × norm [in pieces]", "seen", "why it is", "patch:rms_norm", 9.5, 2**30,
                    applied=True, note="saved +9 ms", next_step="not shown when applied"),
            Finding("host waits", "12 syncs", "item()", "", 0.0, 0, next_step="keep it on the GPU"),
        ],
        proof=Proof(True, [{"name": "gradient of a", "passed": True, "error": 1e-7,
                            "plain_error": 2e-7, "of_allowed": 0.3, "reason": ""}], "32 tokens"),
        next="next: nearlight.patch(model)",
    )  # fmt: skip


def drawn(report, width=120):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    draw(report, console)
    return console.file.getvalue()


def test_the_answer_is_first_and_the_next_step_last(report):
    lines = drawn(report).strip().splitlines()
    assert lines[0] == report.answer and lines[1] == report.setup
    assert lines[-1] == report.next


def test_long_answers_stay_on_one_line(report):
    assert drawn(report, width=20).splitlines()[0] == report.answer


def test_on_a_terminal_long_answers_break_at_words(report):
    console = Console(file=io.StringIO(), width=20, no_color=True, force_terminal=True)
    draw(report, console)
    shown = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()
    assert [line.rstrip() for line in shown[:2]] == ["tiny on h200: 61.2 →", "44.8 ms a step"]


def test_before_and_after_with_their_intervals(report):
    text = drawn(report)
    assert re.search(r"before \(predicted\)\s+after \(predicted\)", text)
    assert re.search(r"step\s+61\.20 ms \(56\.2 to 66\.2\)\s+44\.80 ms \(39\.8 to 49\.8\)", text)
    assert re.search(r"tokens/s\s+16,384\s+16,384", text)
    assert re.search(r"peak memory\s+3\.00 GiB\s+512 MiB", text)
    assert re.search(r"share of the limit\s+33% of 20\.0 ms\s+45% of 20\.0 ms", text)
    assert re.search(r"parameters\s+1\.00 GiB\s+1\.00 GiB", text)


def test_without_tokens_samples_are_shown():
    text = drawn(Report("predict", "a", before=state(61.2, tokens_per_s=None)))
    assert "tokens/s" not in text and re.search(r"samples/s\s+8\.0", text)
    assert "after" not in text


def test_findings_say_what_came_of_them(report):
    text = drawn(report)
    assert "1. 61 × norm [in pieces] (applied, promises 9.50 ms and 1.00 GiB)" in text
    assert "   why: why it is\n   fix: patch:rms_norm\n   saved +9 ms\n" in text
    assert "not shown when applied" not in text
    assert "2. host waits (open, promises nothing by itself)" in text
    assert "   do: keep it on the GPU" in text


def test_text_that_looks_like_markup_is_printed_as_it_is():
    odd = "[red]x[/red] [/bold]"
    report = Report(
        "optimize", odd, setup=odd, next=odd, rows=[{odd: odd}],
        before=state(1.0, share=0.5, ops=[row(name=odd, module=odd)]),
        findings=[Finding(odd, odd, odd, odd, 1.0, 0, note=odd)],
        proof=Proof(False, [{"name": odd, "passed": False, "reason": odd}], odd),
    )  # fmt: skip
    text = drawn(report, width=200)
    # answer, setup, op, module, finding × 5, head and cell, proof's method, name, reason, next
    assert text.count(odd) == 15


def test_a_failed_proof_names_every_failed_quantity():
    rows = [
        {"name": "loss", "passed": False, "reason": "not computed by the patched run"},
        {"name": "logits", "passed": False, "error": 1e-3, "plain_error": 1e-7, "of_allowed": 99.0,
         "reason": "whole 0.001 > 1e-06"},
        {"name": "gradient of a", "passed": True, "error": 1e-7, "plain_error": 1e-7,
         "of_allowed": 0.5, "reason": ""},
    ]  # fmt: skip
    text = drawn(Report("optimize", "a", proof=Proof(False, rows, "32 tokens")))
    assert "proof failed: 32 tokens" in text
    assert "3 quantities; nearest to its limit: logits, error 1.0e-03" in text
    assert "loss: not computed by the patched run" in text
    assert "logits: whole 0.001 > 1e-06" in text
    assert "gradient of a" not in text


def test_a_proof_that_was_not_run_says_so():
    text = drawn(Report("optimize", "a", proof=Proof(False, [], "not run: no memory")))
    assert "proof failed: not run: no memory" in text and "quantities" not in text


def test_rows_of_repeated_layers_are_merged():
    rows = [
        row(module="model.layers.0.mlp", time_ms=1.0, limit_ms=0.5, calls=3),
        row(module="model.layers.11.mlp", time_ms=3.0, limit_ms=0.5, calls=3),
        row(module="model.layers.11.mlp", time_ms=1.0, bound="memory", limit_ms=0.1),
        row(name="aten::mul", module="lm_head", time_ms=9.0, share=None, limit_ms=0.0),
    ]
    first, second, third = merged(rows)
    assert (first.name, first.share) == ("aten::mul", None)
    assert (second.module, second.calls, second.time_ms) == ("model.layers.*.mlp", 6, 4.0)
    assert (second.limit_ms, second.share, second.flops, second.bytes) == (1.0, 0.25, 20, 40)
    assert third.bound == "memory"


def test_only_the_slowest_ops_are_drawn():
    ops = [row(name=f"op{i:02}", module=f"part{i}", time_ms=float(i + 1)) for i in range(20)]
    text = drawn(Report("predict", "a", before=state(50.0, ops=ops)))
    assert [f"op{i:02}" for i in range(19, 19 - TOP_OPS, -1)] == re.findall(r"op\d\d", text)


def test_rows_of_other_verbs_are_a_table():
    rows = [{"op": "rms_norm", "time": 1.23456, "note": None}, {"op": "rope", "limit": 3}]
    text = drawn(Report("bench", "a", rows=rows))
    assert re.search(r"op\s+time\s+limit", text)  # a column with nothing in it is left out
    assert re.search(r"rms_norm\s+1\.235\s*\n", text) and re.search(r"rope\s+3\s*\n", text)


def test_a_row_with_the_cause_of_another_names_that_one_and_lines_stand_once():
    rows = [
        {"number": 1, "property": "values", "reason": "output: wrong", "reproduce": "first()"},
        {
            "number": 2,
            "property": "layouts",
            "reason": "x: wrong",
            "reproduce": "as_first()",
            "same_as": "values",
        },
        {"number": 7, "property": "poison", "reason": "past the end", "reproduce": "other()"},
    ]
    text = drawn(Report("check", "a", rows=rows, next="first()"))
    assert re.search("layouts +as values", text) and "as_first" not in text
    assert (text.count("first()"), text.count("other()")) == (1, 1)
    assert text.rstrip().endswith("\nfirst()  # 1 values\nother()  # 7 poison")
    assert drawn(Report("check", "a", rows=rows[:2], next="first()")).endswith("\nfirst()\n")


def test_time_without_a_cost_model_and_a_slower_profiled_step_are_said():
    def remarked(unmodelled_ms, kernel_ms):
        figures = {
            "unmodelled_ms": Figure(unmodelled_ms, "ms", "measured", "s"),
            "kernel_ms": Figure(kernel_ms, "ms", "measured", "s"),
        }
        return drawn(Report("predict", "a", before=state(50.0, figures=figures)))

    text = remarked(1.0, 60.0)
    assert "1.00 ms, 2.0% of the step, are ops without a cost model" in text
    assert "kernels of the profiled step add up to 60.0 ms, 10.0 more than the step takes" in text
    quiet = remarked(0.2, 50.0)
    assert "without a cost model" not in quiet and "profiled step" not in quiet

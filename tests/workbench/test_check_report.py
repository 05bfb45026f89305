"""The report of a check: what its first line counts, and what failed, as lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearlight.workbench.check_report import (
    NOT_APPLICABLE,
    ON_A_GPU,
    Header,
    Row,
    as_report,
    broken,
)

HEADER = Header("scale", "my_op.py", False, "cpu", "", {"torch": "2"})
PASSED = Row(1, "values", "passed", 3, "", "", 0.1, ["k"])
FAILED = Row(2, "layouts", "failed", 1, "output differs", "reproduce(1)", 0.1)
GPU = Row(9, "determinism", NOT_APPLICABLE, 0, "proves nothing here", "", 0.0, needs_gpu=True)
NEVER = Row(4, "size", NOT_APPLICABLE, 0, "the record names no case for a GPU", "", 0.0)


@pytest.mark.parametrize(
    ("rows", "answer", "passed"),
    [
        ([PASSED], "scale: 1 of 1 properties hold", True),
        ([PASSED, GPU, NEVER], "scale: 1 of 1 properties hold, 1 needs a GPU", True),
        ([PASSED, GPU, GPU], "scale: 1 of 1 properties hold, 2 need a GPU", True),
        (
            [PASSED, FAILED, GPU],
            "scale: 1 of 2 properties hold, 1 needs a GPU; broken: layouts",
            False,
        ),
        ([GPU], "scale: nothing is proved here: determinism needs a GPU", False),
        ([NEVER], "scale: nothing is proved here: size not applicable", False),
        (
            [replace(GPU, property="values"), replace(PASSED, property="size")],
            "scale: values not run; 1 of 1 properties hold, 1 needs a GPU",
            True,
        ),
    ],
)
def test_the_answer_counts_what_holds_and_what_needs_a_gpu(rows, answer, passed):
    report = as_report(HEADER, rows)
    assert report.answer == answer
    assert report.proof is not None and report.proof.passed is passed
    assert bool(broken(report)) is (rows == [NEVER] or FAILED in rows)


def test_what_another_property_names_points_to_it_though_it_came_first():
    stray = replace(FAILED, property="poison", reason="wrote 4 bytes past the end of y")
    crash = replace(FAILED, property="memory", reason="ended by SIGSEGV", reproduce="reproduce(2)")
    report = as_report(HEADER, [replace(crash, named_by="poison"), stray])
    assert [row.get("same_as") for row in report.rows] == ["poison", None]
    assert report.next == stray.reproduce
    report = as_report(HEADER, [crash, stray])
    assert not [row for row in report.rows if "same_as" in row]
    assert report.next == crash.reproduce


@pytest.mark.parametrize("rows", [[GPU], [NEVER], [NEVER, GPU]])
def test_where_nothing_was_judged_nothing_passed_and_nothing_failed(rows):
    proof = as_report(HEADER, rows).proof
    assert proof is not None and not proof.passed and proof.verdict == "incomplete"
    is_elsewhere = as_report(HEADER, rows).next.startswith("on a machine with a GPU: ")
    assert is_elsewhere is (GPU in rows)


def test_of_a_part_of_the_check_it_is_said_what_was_asked_for():
    header = replace(HEADER, only=("values", "size"))
    compiled = replace(PASSED, property="size", kernels=[], compiled=["k<float>", "k<double>"])
    waiting = replace(GPU, property="values", reason=ON_A_GPU)
    report = as_report(header, [compiled])
    assert report.setup == "check of values, size alone, compiled and read, not run: k"
    assert str(report.proof.verdict) == "passed" and report.next == "nearlight check my_op.py"
    report = as_report(header, [compiled, waiting])
    assert report.proof.verdict == "incomplete" and report.proof.passed
    failed = as_report(header, [replace(compiled, status="failed"), waiting]).proof
    assert failed.verdict == "failed" and not failed.passed
    assert report.proof.method == (
        "values, size alone; compiled and read, not run; CUDA C++ runs on a GPU alone; "
        "not proved here: values"
    )
    assert report.next == "on a machine with a GPU: nearlight check my_op.py --device cuda"


def test_each_cause_is_told_once_and_what_has_it_names_the_first():
    causes = ("values", "output"), ("layouts", "output"), ("poison", "past"), ("size", "")
    rows = [replace(FAILED, property=name, cause=cause) for name, cause in causes]
    report = as_report(HEADER, [PASSED, *rows])
    assert [row.get("same_as") for row in report.rows] == [None, None, "values", None, None]
    assert report.rows[2]["reproduce"] == "reproduce(1)"  # the report keeps it, the text does not
    values, layouts, poison, size = broken(report)
    assert layouts == "layouts: as values"
    assert [line.count("reproduce(1)") for line in (values, poison, size)] == [1, 1, 1]


def test_a_proof_without_values_is_incomplete():
    report = as_report(HEADER, [replace(GPU, property="values"), replace(PASSED, property="size")])
    assert report.proof is not None and report.proof.passed and report.proof.is_partial
    assert "proof incomplete: interpreted; not proved here: values" in str(report)
    assert "proof passed: " in str(as_report(HEADER, [PASSED, GPU]))
    assert "proof failed: " in str(as_report(HEADER, [replace(GPU, property="values"), FAILED]))


def test_on_a_gpu_nothing_needs_one():
    header = Header("scale", "scale", True, "cuda", "h200", {})
    report = as_report(header, [PASSED, GPU])
    assert report.answer == "scale: 1 of 1 properties hold"
    assert report.setup == "quick check, on cuda; launched k" and report.gpu == "h200"


@pytest.mark.parametrize(
    ("rows", "setup"),
    [
        ([replace(PASSED, kernels=[]), FAILED], "launched no nearlight kernel: plain PyTorch code"),
        ([FAILED], "launched no nearlight kernel: plain PyTorch code"),
        ([replace(FAILED, reason="raised OSError: x")], "launched no kernel that came back"),
        ([replace(FAILED, reason="ended by SIGSEGV")], "launched no kernel that came back"),
        ([replace(FAILED, reason="did not finish in 3 s")], "launched no kernel that came back"),
        ([replace(FAILED, reason="make_inputs: no", num_trials=0)], "nothing was run"),
        ([NEVER], "nothing was run"),
    ],
)
def test_what_ran_is_said_of_what_launched_nothing(rows, setup):
    assert as_report(HEADER, rows).setup.removeprefix("full check, ").endswith(setup)


def test_of_what_was_not_run_nothing_is_said_to_be_interpreted():
    report = as_report(replace(HEADER, only=("size",)), [NEVER])
    assert report.proof is not None and report.proof.method == "size alone; nothing was run"
    assert "interpreted" not in str(report)


def test_what_is_broken_comes_with_the_line_that_shows_it():
    report = as_report(HEADER, [PASSED, FAILED])
    assert broken(report) == ["layouts: output differs\n  reproduce(1)"]
    assert report.next == "reproduce(1)"
    following = "nearlight inspect my_op.py  # then, with a GPU: nearlight bench my_op.py"
    assert as_report(HEADER, [PASSED]).next == following
    assert as_report(replace(HEADER, quick=True), [PASSED]).next == "nearlight check my_op.py"
    assert as_report(replace(HEADER, device="cuda"), [PASSED]).next == "nearlight bench my_op.py"
    nothing = broken(as_report(HEADER, [NEVER]))
    assert nothing == ["no property could be judged here", f"size: {NEVER.reason}"]

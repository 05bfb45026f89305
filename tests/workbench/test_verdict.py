"""One property of one op: rows, the smallest failing input, kernels that cannot run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nearlight.core import cuda
from nearlight.core.op import Case
from nearlight.workbench import verdict
from nearlight.workbench.check import check
from nearlight.workbench.check_report import NOT_APPLICABLE, ON_A_GPU
from nearlight.workbench.load import load_op
from nearlight.workbench.property import Property
from nearlight.workbench.trial import Rejected, Trial
from nearlight.workbench.verdict import prove_property

TWINS = Path(__file__).with_name("twins.py")
OP = load_op(str(TWINS))
CU = 'extern "C" __global__ void scale(float* y, const float* x, long n) {}\n'


def test_a_row_on_few_cases_names_them():
    cases = [
        Case("long", {"rows": 3, "columns": 5}, torch.bfloat16, {"casting": "llama"}),
        Case("wide", {"rows": 1, "columns": 70}, torch.float32),
    ]

    def row_of(cases):
        found = Property(4, "size", "", lambda *_: map(Trial, cases), lambda *_: "")
        return prove_property(found, OP, False, "cpu")

    row = row_of([*cases, cases[0]])
    assert row.reason == (
        "on rows 3 × columns 5 in bfloat16, casting=llama; rows 1 × columns 70 in float32"
    )
    assert row.num_trials == 3
    many = [Case("", {"rows": n, "columns": 2}, torch.float32) for n in range(1, 6)]
    assert row_of(many).reason == ""


def test_each_input_is_announced_before_it_runs_and_each_smaller_failure_with_its_reason():
    told: list[tuple[str, ...]] = []

    def examine(op, trial, device):
        rows = trial.case.shape["rows"]
        told.append(("ran", str(rows)))
        if rows == 1:
            raise Rejected("none of one row")
        return "too many rows" if rows > 3 else ""

    def announce(line: str, reason: str, mark: object):
        told.append((line.partition("{'rows': ")[2][:2].strip(","), reason))

    case = Case("", {"rows": 10, "columns": 1}, torch.float32)
    found = Property(4, "size", "", lambda *_: [Trial(case)], examine)
    row = prove_property(found, OP, False, "cpu", announce)
    assert told[0] == ("", "")  # while inputs are chosen
    before = [a for a, b in pairwise(told) if b[0] == "ran"]
    ran = [entry for entry in told if entry[0] == "ran"]
    assert before == [(rows, "") for _, rows in ran] and len(ran) > 4
    known = [entry for entry in told if entry[1] == "too many rows"]
    assert known == [("10", "too many rows"), ("5", "too many rows"), ("4", "too many rows")]
    assert (row.status, row.reason) == ("failed", "too many rows")
    assert "{'rows': 4, 'columns': 1}" in row.reproduce


def test_the_ops_file_is_looked_for_once_however_many_inputs(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(verdict, "source_of", lambda op: asked.append(op.name) or "my_op.py:OP")
    cases = [Case("", {"rows": rows, "columns": 1}, torch.float32) for rows in (8, 9)]
    found = Property(
        4, "size", "", lambda *_: map(Trial, cases), lambda _, trial, __: "no" * (trial.size > 8)
    )
    row = prove_property(found, OP, False, "cpu", lambda line, reason, mark: None)
    assert row.status == "failed" and "reproduce('my_op.py:OP', 'size', {" in row.reproduce
    assert asked == [OP.name]


@pytest.mark.parametrize(("rows", "smallest", "reason"), [(20, 5, "wrong"), (4, 1, "raised V")])
def test_the_smallest_input_fails_in_the_same_way(rows: int, smallest: int, reason: str):
    """A wrong value stays one; an error is made smaller as well."""

    def examine(op, trial, device):
        if trial.case.shape["rows"] < 5:
            raise ValueError("fewer than five rows")
        return "wrong"

    case = Case("", {"rows": rows, "columns": 1}, torch.float32)
    found = Property(4, "size", "", lambda *_: [Trial(case)], examine)
    row = prove_property(found, OP, False, "cpu")
    assert row.reason.startswith(reason)
    assert f"{{'rows': {smallest}, 'columns': 1}}" in row.reproduce


def test_a_smaller_input_breaks_the_same_result():
    """And not one that small sizes alone break."""
    reasons = ["output: 3", "output 1: 3", "gradient of x: no", "gradient of x: 7", "output: 5"]
    case = Case("", {"rows": len(reasons)}, torch.float32)
    found = Property(
        4, "size", "", lambda *_: [Trial(case)],
        lambda op, trial, device: reasons[trial.case.shape["rows"] - 1],
    )  # fmt: skip
    row = prove_property(found, OP, False, "cpu")
    assert row.reason == "output: 3" and "{'rows': 1}" in row.reproduce
    reasons[0] = "gradient of x: 3"
    row = prove_property(found, OP, False, "cpu")
    assert row.reason == "output: 5" and "{'rows': 5}" in row.reproduce


@pytest.fixture
def cuda_op(tmp_path: Path):
    """The twin with its Triton launch replaced by one in CUDA C++."""
    (tmp_path / "scale.cu").write_text(CU, encoding="utf-8")
    kernel = cuda.Kernel(
        tmp_path / "scale.cu", "scale", defines=(("TILE", "32"), ("DTYPE", "float"))
    )

    def scale(x, weight, backend="auto"):
        y = torch.empty_like(x)
        kernel[(1,), (256,)](y, x.detach(), x.numel())
        return y

    return dataclasses.replace(OP, function=scale)


def test_a_value_error_of_a_backward_is_no_refusal():
    """Nor one of a launcher: only what a function says before it launches anything."""

    def late(x, weight, backend="auto"):
        y = OP.function(x, weight, backend=backend)
        if (x == 0).any():
            raise ValueError("too many values to unpack")
        return y

    def early(x, weight, backend="auto"):
        if (x == 0).any():
            raise ValueError("x: rows of zeros have no direction")
        return OP.function(x, weight, backend=backend)

    for function, status in ((late, "failed"), (early, "passed")):
        (row,) = check(dataclasses.replace(OP, function=function), only=["extremes"]).rows
        assert row["status"] == status, row
    assert "refuses" in row["reason"]


def test_cuda_on_cpu_tensors_is_not_judged_and_the_answer_counts_it(cuda_op):
    report = check(cuda_op, quick=True)
    assert {(row["status"], row["reason"]) for row in report.rows[:3]} == {
        (NOT_APPLICABLE, ON_A_GPU)
    }
    assert report.setup == "quick check, compiled and read, not run: scale"
    names = "values, layouts, poison"
    assert report.answer == f"scale (sound): nothing is proved here: {names} need a GPU"
    assert report.next.startswith("on a machine with a GPU: nearlight check ")
    assert report.proof is not None and report.proof.verdict == "incomplete"


@pytest.mark.parametrize("swallow", [str, Rejected])
def test_a_property_that_catches_what_cannot_run_does_not_judge_it(cuda_op, swallow: Callable):
    def examine(op, trial, device):
        x = torch.ones(2, 2)
        try:
            op.function(x, x)
        except Exception as error:
            if swallow is Rejected:
                raise Rejected(str(error)) from error
            return f"raised {error}"
        return ""

    case = Case("", {"rows": 1, "columns": 1}, torch.float32)
    found = Property(4, "size", "", lambda *_: [Trial(case)], examine)
    row = prove_property(found, cuda_op, False, "cpu")
    assert (row.status, row.reason, row.compiled) == (NOT_APPLICABLE, ON_A_GPU, ["scale"])
    assert row.needs_gpu


def test_a_function_without_return_misses_its_output():
    op = dataclasses.replace(OP, function=lambda x, weight: None)
    (row,) = check(op, only=["values"]).rows
    assert row["reason"].startswith("output: missing (the function returned None")


def _causes(op) -> dict[str, str]:
    """Return for each broken property its reason, or the one whose cause it has."""
    rows = [row for row in check(op, quick=True).rows if row["status"] == "failed"]
    return {row["property"]: row.get("same_as") or row["reason"] for row in rows}


def test_results_that_differ_in_number_have_one_cause(plain_op):
    op = plain_op(lambda x: (2 * x, x.detach() + 1), lambda x: 2 * x)
    as_values = dict.fromkeys(("layouts", "poison"), "values")
    assert _causes(op) == {"values": "2 outputs, the reference has 1", **as_values}


@pytest.mark.parametrize("part", ["make_inputs", "reference"])
def test_a_part_of_the_record_that_is_not_written_yet_is_one_cause(plain_op, part: str):
    def todo(*_, **__):
        raise NotImplementedError("todo")

    op = dataclasses.replace(plain_op(lambda x: 2 * x), **{part: todo})
    causes = _causes(op)
    assert causes.pop("values").startswith(f"{part}: todo at test_verdict.py:")
    assert causes == dict.fromkeys(("layouts", "poison"), "values")


def test_what_an_op_raises_while_inputs_are_chosen_is_the_cause_that_it_is_elsewhere(plain_op):
    def function(x):
        raise StopIteration("odd")

    causes = _causes(plain_op(function, lambda x: 2 * x))
    assert causes.pop("values").startswith("raised StopIteration: odd at test_verdict.py:")
    assert causes == dict.fromkeys(("layouts", "poison"), "values")


def test_the_users_interrupt_is_no_finding(plain_op):
    def function(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(plain_op(function, lambda x: 2 * x), only=["values"])


@pytest.mark.parametrize("kind", [GeneratorExit, BaseException, SystemExit])
def test_whatever_an_op_raises_is_the_finding(plain_op, kind: type[BaseException]):
    def function(x):
        raise kind("odd")

    op = plain_op(function, lambda x: 2 * x)
    (row,) = check(op, only=["values"]).rows
    assert row["status"] == "failed" and f"{kind.__name__}: odd" in row["reason"]

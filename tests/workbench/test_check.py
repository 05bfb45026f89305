"""`check`: the report, the smallest failing input, ops by name and by file."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.op import Case
from nearlight.core.versions import versions
from nearlight.workbench.check import ON_REQUEST, check, chosen, each_row, load_op, reproduce
from nearlight.workbench.properties import PROPERTIES

TWINS = Path(__file__).with_name("twins.py")


def twin(fault: str):
    return sys.modules[load_op(f"{TWINS}").reference.__module__].twin(fault)


def test_the_sound_op_has_every_property():
    report = check(load_op(str(TWINS)))
    assert report.proof is not None
    assert report.proof.passed, report.rows
    assert [row["property"] for row in report.rows] == [prop.name for prop in PROPERTIES]
    judged = [row for row in report.rows if row["status"] == "passed"]
    num_trials = {row["property"]: row["num_trials"] for row in judged}
    for name in ("values", "layouts", "shapes", "lifecycle", "extremes", "poison"):
        assert num_trials[name] > 3
    assert report.answer == f"scale (sound): {len(judged)} of {len(judged)} properties hold"
    assert "_scale_fwd_kernel" in report.setup


def test_quick_proves_values_layouts_and_guard_zones():
    report = check(load_op(str(TWINS)), quick=True)
    assert [row["property"] for row in report.rows] == [
        "values",
        "layouts",
        "poison",
        "machine code",
    ]
    assert report.proof is not None and report.proof.passed


def test_a_failure_comes_with_its_smallest_input_as_one_line_that_runs():
    report = check(load_op(f"{TWINS}:WRONG_FACTOR"), only=["values"])
    (row,) = report.rows
    assert "'rows': 1, 'columns': 1}" in row["reproduce"]
    assert report.next == row["reproduce"]
    run = subprocess.run(
        [sys.executable, "-c", row["reproduce"]], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("AssertionError: gradient of x")


def test_reproduce_says_when_an_input_holds(capsys: pytest.CaptureFixture[str]):
    reproduce(str(TWINS), "values", {"rows": 3, "columns": 5}, torch.float32, seed=4)
    assert "values holds on this input" in capsys.readouterr().out


def test_an_op_without_kernels_is_said_to_be_plain():
    op = twin("")
    plain = dataclasses.replace(op, function=lambda x, weight: x * weight)
    assert "no nearlight kernel" in check(plain, quick=True).setup


def test_fp64_alone_is_not_applicable():
    op = twin("")
    only_wide = [Case("wide", {"rows": 4, "columns": 4}, torch.float64)]
    report = check(dataclasses.replace(op, check_cases=only_wide), only=["layouts"])
    assert report.rows[0]["status"] == "not applicable"
    assert report.proof is not None and not report.proof.passed


def test_bad_input_is_refused_with_what_is_allowed(tmp_path: Path):
    with pytest.raises(ValueError, match="no property called 'speed'; there are values"):
        check(twin(""), only=["speed"])
    with pytest.raises(ValueError, match="allowed are cpu and cuda"):
        check(twin(""), device="tpu")
    with pytest.raises(ValueError, match="no op called"):
        load_op("rms_nrm")
    with pytest.raises(ValueError, match="no file"):
        load_op(str(tmp_path / "absent.py"))
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(ValueError, match="define OP = Op"):
        load_op(str(empty))
    with pytest.raises(ValueError, match="it has .*OP, "):
        load_op(f"{TWINS}:ABSENT")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_missing_part():
    with pytest.raises(MissingPart, match=r"device='cuda': this machine has no GPU"):
        check(twin(""), device="cuda")
    with pytest.raises(MissingPart, match=r"device='cuda:1'"):
        reproduce(str(TWINS), "values", {"rows": 3, "columns": 5}, torch.float32, device="cuda:1")


def test_a_file_that_does_not_import_is_bad_input_at_its_line(tmp_path: Path):
    file = tmp_path / "broken.py"
    for text, complaint in (
        ("x = 1\nx = = 2\n", r"broken\.py:2: SyntaxError: invalid syntax"),
        ("import math\n\nmath.sqrt(-1)\n", r"broken\.py:3: ValueError: math domain error"),
        ("raise SystemExit('no GPU')\n", r"broken\.py:1: SystemExit: no GPU"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=complaint):
            load_op(str(file))


def test_the_sanitizer_runs_where_it_is_asked_for():
    assert chosen(None, sanitize=True) == chosen(None) == list(PROPERTIES)
    assert ON_REQUEST not in {prop.name for prop in chosen(None, quick=True)}
    assert ON_REQUEST in {prop.name for prop in chosen(None, quick=True, sanitize=True)}

    def reason(only, sanitize):
        prop = next(prop for prop in PROPERTIES if prop.name == ON_REQUEST)
        (row,) = each_row(twin(""), [prop], False, "cpu", only, sanitize)
        assert row.status == "not applicable"
        return row.reason

    assert reason(None, False) == "--sanitize runs it"
    # Chosen: what it says now is its own answer on a CPU.
    assert "on a GPU" in reason(None, True) and "on a GPU" in reason([ON_REQUEST], False)


def test_a_report_can_be_written_as_json(tmp_path: Path):
    report = check(load_op(str(TWINS)), quick=True)
    report.save_json(tmp_path / "check.json")
    assert (tmp_path / "check.json").read_text().startswith("{")
    assert versions()["torch"] == torch.__version__

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
from nearlight.workbench.check import (
    ON_REQUEST,
    check,
    chosen,
    each_row,
    reproduce,
    reproduce_property,
)
from nearlight.workbench.load import load_op
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


def test_one_mistake_is_told_once(monkeypatch: pytest.MonkeyPatch):
    """A property that breaks where the values are as wrong has their cause; another has its own."""
    names = ["values", "layouts", "shapes", "lifecycle", "extremes", "poison"]
    rows = check(load_op(f"{TWINS}:WRONG_FACTOR"), only=names).rows
    told = {row["property"]: row.get("same_as") for row in rows if row["status"] == "failed"}
    assert told == {"values": None, **dict.fromkeys(names[1:], "values")}
    wrong = twin("")
    function = wrong.function

    def late(x, weight, backend="auto"):
        if not x.is_contiguous():
            raise OSError("no disk")
        return function(x, weight, backend=backend) + (x.shape[0] > 100)

    rows = check(dataclasses.replace(wrong, function=late), only=["values", "layouts"]).rows
    assert [row["status"] for row in rows] == ["failed"] * 2
    assert "same_as" not in rows[1] and "OSError: no disk" in rows[1]["reason"]


def test_a_line_names_a_file_below_the_working_folder_by_its_way_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "ops"
    folder.mkdir()
    text = TWINS.read_text(encoding="utf-8").replace("twins::", "twins_below::")
    text = text.replace("torch.ops.twins.", "torch.ops.twins_below.")
    (folder / "mine.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (row,) = check(load_op("ops/mine.py:WRONG_FACTOR"), only=["values"]).rows
    assert "reproduce('ops/mine.py:WRONG_FACTOR', " in row["reproduce"]
    with pytest.raises(AssertionError, match="gradient of x"):
        exec(row["reproduce"], {})
    monkeypatch.chdir(folder)
    with pytest.raises(BadInput, match=rf"no file ops/mine\.py in {folder}"):
        exec(row["reproduce"], {})


def test_reproduce_says_when_an_input_holds(capsys: pytest.CaptureFixture[str]):
    reproduce(str(TWINS), "values", {"rows": 3, "columns": 5}, torch.float32, seed=4)
    assert "values holds on this input" in capsys.readouterr().out
    # Of a whole property it is said as its row says it.
    reproduce_property(str(TWINS), "machine code", quick=True)
    assert capsys.readouterr().out.endswith(
        ": machine code: not applicable the full check compiles for every arch\n"
    )


def test_what_decides_a_trial_has_no_default():
    """And nothing is taken that would be ignored."""
    with pytest.raises(TypeError, match="'shape' and 'dtype'"):
        reproduce(str(TWINS), "values")
    with pytest.raises(TypeError, match="'quick'"):
        reproduce(str(TWINS), "values", {"rows": 3, "columns": 5}, torch.float32, quick=True)
    with pytest.raises(TypeError, match="'seed'"):
        reproduce_property(str(TWINS), "values", seed=4)


def test_an_op_without_kernels_is_said_to_be_plain():
    op = twin("")
    plain = dataclasses.replace(op, function=lambda x, weight: x * weight)
    assert "no nearlight kernel" in check(plain, quick=True).setup


def test_fp64_alone_is_judged_and_products_in_fp32_are_found():
    only_wide = [Case("wide", {"rows": 4, "columns": 4}, torch.float64)]
    report = check(dataclasses.replace(twin(""), check_cases=only_wide), only=["values"])
    assert report.rows[0]["status"] == "failed"
    assert report.rows[0]["reason"].startswith("output: largest error over its row's scale")


def test_bad_input_is_refused_with_what_is_allowed(tmp_path: Path):
    with pytest.raises(ValueError, match="no property called 'speed'; there are values"):
        check(twin(""), only=["speed"])
    with pytest.raises(ValueError, match="allowed are cpu and cuda"):
        check(twin(""), device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_a_missing_part():
    with pytest.raises(MissingPart, match=r"device='cuda': this machine has no GPU"):
        check(twin(""), device="cuda")
    with pytest.raises(MissingPart, match=r"device='cuda:1'"):
        reproduce(str(TWINS), "values", {"rows": 3, "columns": 5}, torch.float32, device="cuda:1")


def test_every_line_that_reproduces_runs_as_it_is_printed(tmp_path: Path, write_package):
    """Of a factory's record, of options without a literal, of what fails before an input is."""
    file = write_package()
    infinite = tmp_path / "infinite.py"
    text = (tmp_path / "kit" / "ops" / "twice.py").read_text(encoding="utf-8")
    text = text.replace("backend=", "limit=(0.0,), backend=").replace("pass", "x = x + 1", 1)
    text = text.replace("def reference(x)", "def reference(x, limit)")
    text = text.replace("torch.float32)", 'torch.float32, {"limit": (float("inf"),)})')
    infinite.write_text(text, encoding="utf-8")
    broken = tmp_path / "broken.py"
    text = text.replace("x = x + 1", "raise OSError('no disk')")
    broken.write_text(text, encoding="utf-8")
    for source, prop, complaint in (
        (f"{file}:THRICE", "values", "AssertionError: output: "),
        (str(infinite), "values", "AssertionError: output: "),
        (str(broken), "poison", "AssertionError: raised OSError: no disk at broken.py:"),
    ):
        (row,) = check(load_op(source), only=[prop]).rows
        run = subprocess.run(
            [sys.executable, "-c", row["reproduce"]], capture_output=True, text=True, check=False
        )
        assert run.returncode == 1, (row["reproduce"], run.stderr)
        assert run.stderr.splitlines()[-1].startswith(complaint), run.stderr
        assert row["reason"] in run.stderr
    assert "reproduce_property('" in row["reproduce"] and row["reproduce"].endswith("'poison')")
    assert row["reason"].endswith(" in twice, while inputs were chosen")


def test_a_record_that_no_file_holds_is_called_op():
    wrong = dataclasses.replace(twin(""), function=lambda x, weight, backend="auto": x + weight)
    (row,) = check(wrong, only=["values"]).rows
    code, _, remark = row["reproduce"].partition("  # ")
    assert remark == "op: the Op called scale (sound)"
    with pytest.raises(AssertionError, match="^output: "):
        exec(code, {"op": wrong})


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

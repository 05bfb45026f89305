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
from nearlight.workbench.verdict import source_of

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


FACTORY = """
import dataclasses
from {helpers} import factor
from {base} import OP as BASE

def make(name):
    reference = lambda x: factor * x
    return dataclasses.replace(BASE, name=name, reference=reference)
"""


def write_package(folder: Path, twice: Path) -> Path:
    """Write a package with an op made by another file of it, beside a folder of the same stems."""
    (folder / "kit" / "ops").mkdir(parents=True)
    (folder / "kit" / "__init__.py").touch()
    (folder / "kit" / "ops" / "__init__.py").touch()
    (folder / "kit" / "helpers.py").write_text("factor = 3\n", encoding="utf-8")
    twice.rename(folder / "kit" / "ops" / "twice.py")
    factory = FACTORY.format(helpers="kit.helpers", base=".ops.twice")
    (folder / "kit" / "factory.py").write_text(factory, encoding="utf-8")
    file = folder / "kit" / "ops" / "thrice.py"
    file.write_text("from ..factory import make\nTHRICE = make('thrice')\n", encoding="utf-8")
    return file


def test_a_file_imports_what_lies_beside_it_and_in_its_package(tmp_path: Path, write_op):
    file = write_package(tmp_path, write_op())
    op = load_op(f"{file}:THRICE")
    assert op.name == "thrice" and source_of(op) == f"{file}:THRICE"
    # A file of the same stem and name is another one.
    other = tmp_path / "other"
    other.mkdir()
    (other / "beside.py").write_text("from twice import OP\n", encoding="utf-8")
    write_op().rename(other / "twice.py")
    (other / "thrice.py").write_text("from beside import OP as THRICE\n", encoding="utf-8")
    twice = load_op(f"{other / 'thrice.py'}:THRICE")
    assert twice.name == "twice" and source_of(op) == f"{file}:THRICE"
    (other / "beside.py").write_text("x = 1 / 0\n", encoding="utf-8")
    sys.modules.pop("beside")
    with pytest.raises(BadInput, match=r"beside\.py:1: ZeroDivisionError"):
        load_op(f"{other / 'thrice.py'}:THRICE")


def test_a_record_without_a_reference_is_bad_input(tmp_path: Path, write_op):
    file = write_op()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("reference=reference,", "reference=None,"), encoding="utf-8")
    with pytest.raises(BadInput, match="OP has reference=None; give it a function"):
        load_op(str(file))
    file.write_text(text.replace("reference=reference,", ""), encoding="utf-8")
    with pytest.raises(BadInput, match=r"twice\.py:\d+: TypeError: .*'reference'"):
        load_op(str(file))
    with pytest.raises(BadInput, match=r"named by the Python file that launches axpy\.cu"):
        load_op("axpy.cu")


def test_every_line_that_reproduces_runs_as_it_is_printed(tmp_path: Path, write_op):
    """Of a factory's record, of options without a literal, of what fails before an input is."""
    file = write_package(tmp_path, write_op())
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
    assert "reproduce('" in row["reproduce"] and row["reproduce"].endswith("'poison')")
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

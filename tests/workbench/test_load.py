"""Ops by name and by file: what is loaded, how it is found again, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nearlight.core.errors import BadInput
from nearlight.workbench.load import home_of, load_op, source_of

TWINS = Path(__file__).with_name("twins.py")
OP = load_op(str(TWINS))


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path):
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


def test_a_file_imports_what_lies_beside_it_and_in_its_package(
    tmp_path: Path, write_op, write_package
):
    file = write_package()
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
    with pytest.raises(BadInput, match=r"twice\.py:24: Op\(.* lacks reference: .*plain torch"):
        load_op(str(file))
    file.write_text(text.replace("def reference", "def referense"), encoding="utf-8")
    with pytest.raises(BadInput, match=r"twice\.py:27: Op\(.* lacks reference: .*plain torch"):
        load_op(str(file))
    text = text.replace("reference=reference,", "").replace("make_inputs=make_inputs,", "")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=r"lacks reference: .*, and make_inputs: .*seeded random"):
        load_op(str(file))
    with pytest.raises(BadInput, match=r"named by the Python file that launches axpy\.cu"):
        load_op("axpy.cu")


def test_an_op_is_found_again_by_the_file_that_holds_its_record(tmp_path: Path):
    op = load_op(str(TWINS))
    assert home_of(op) == source_of(op) == f"{TWINS}:OP"
    load_op(str(TWINS))  # once more: the record is no longer the file's own
    assert (home_of(op), source_of(op)) == ("", f"{TWINS}:OP")
    wrapped = functools.wraps(OP.function)(lambda **inputs: OP.function(**inputs))
    assert source_of(dataclasses.replace(op, function=wrapped)) == f"{TWINS}:OP"
    assert source_of(dataclasses.replace(op, function=lambda **inputs: None)) == ""
    assert source_of(load_op(f"{TWINS}:WRONG_FACTOR")) == f"{TWINS}:WRONG_FACTOR"
    assert home_of(load_op("rms_norm")) == "rms_norm"
    # A reference of torch's own does not make torch the op's file.
    plain = tmp_path / "plain.py"
    text = TWINS.read_text(encoding="utf-8").replace("twins::", "plain_twins::")
    text += "\nPLAIN = __import__('dataclasses').replace(\n"
    plain.write_text(text + "    OP, reference=torch.nn.functional.silu)\n", encoding="utf-8")
    assert source_of(load_op(f"{plain}:PLAIN")) == f"{plain}:PLAIN"
    assert home_of(dataclasses.replace(OP, name="another")) == ""


def test_a_file_that_only_imports_a_record_is_not_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    op, ours = load_op(str(TWINS)), load_op("rms_norm")
    importer = ModuleType("test_importer")
    importer.__file__, importer.OP, importer.OURS = str(tmp_path / "test_importer.py"), op, ours
    monkeypatch.setitem(sys.modules, "test_importer", importer)  # the last import of all
    assert (home_of(op), home_of(ours)) == (f"{TWINS}:OP", "rms_norm")


@pytest.mark.parametrize("part", ["cases", "check_cases", "large_cases"])
@pytest.mark.parametrize("value", ["['x']", "[OP.check_cases[0], {'rows': 3}]", "None"])
def test_a_case_that_is_none_is_bad_input(write_op, part: str, value: str):
    path = write_op()
    edit = f"import dataclasses\nOP = dataclasses.replace(OP, {part}={value})\n"
    path.write_text(path.read_text("utf-8") + edit, encoding="utf-8")
    with pytest.raises(BadInput, match=f"OP has .* in its {part}, allowed are Cases"):
        load_op(str(path))

"""Ops by name and by file: what is loaded, how it is found again, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nearlight.core.errors import BadInput
from nearlight.workbench.apart import check_apart
from nearlight.workbench.load import home_of, load_file, load_op, source_of

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


PARTS = """
import parts
import pack.size
def later():
    import parts
    return parts.SIZE, parts.__file__
SIZES = parts.SIZE, pack.size.SIZE
"""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("[3, 5], torch.float32", "shape=[3, 5], allowed is a dict of sizes by name"),
        ("{'rows': 3.0}, torch.float32", "rows=3.0 in its shape, allowed are whole numbers from 0"),
        ("{'rows': '3'}, torch.float32", "rows='3' in its shape, allowed are whole numbers from 0"),
        ("{'rows': 3}, 'float32'", "dtype='float32', allowed is a torch.dtype"),
        ("{'rows': 3}, torch.float32, [1]", "options=[1], allowed is a dict of the function's"),
    ],
)
def test_a_case_of_wrong_types_is_bad_input(write_op, given: str, words: str):
    file = write_op()
    text = f"\nOP = __import__('dataclasses').replace(OP, cases=[Case('odd', {given})])\n"
    file.write_text(file.read_text(encoding="utf-8") + text, encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(f"OP has a case 'odd' with {words}")):
        load_op(str(file))


def test_files_of_two_folders_import_each_its_own_neighbours_of_one_name(tmp_path: Path):
    files = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        (folder / "pack").mkdir(parents=True)
        (folder / "pack" / "__init__.py").touch()
        for name in ("parts.py", "pack/size.py"):
            (folder / name).write_text(f"SIZE = {size}\n")
        files.append(folder / "op.py")
        files[-1].write_text(PARTS)
    (tmp_path / "1" / "alone.py").touch()
    for size in (1, 2, 1):
        found = load_file(files[size - 1])
        assert found.SIZES == (size, size)
        assert found.later() == (size, str(tmp_path / str(size) / "parts.py"))
    alone = importlib.import_module("alone")  # what has no like in the other folder stays
    load_file(files[1])
    assert importlib.import_module("alone") is alone
    # Of a file that was loaded, and in a folder of its own, too.
    (tmp_path / "1" / "pack" / "own.py").write_text("from pack.size import SIZE\n")
    assert load_file(tmp_path / "1" / "pack" / "own.py").SIZE == 1


def test_the_users_own_path_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "op.py").write_text("import nearlight_test_parts as parts\n")
        (tmp_path / name / "nearlight_test_parts.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    before = [*sys.path]
    parts = load_file(tmp_path / "second" / "op.py").parts
    assert [p for p in sys.path if p in before] == before and "first" in parts.__file__
    assert load_file(tmp_path / "first" / "op.py").parts is parts
    assert load_file(tmp_path / "second" / "op.py").parts is parts


def test_the_process_of_a_check_imports_the_neighbours_of_its_own_op(tmp_path: Path, write_op):
    text = write_op().read_text()
    files = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        named = text.replace('"twice"', f'"{folder}"')
        assert named != text
        (tmp_path / folder / "part_of_it.py").write_text(named)
        files.append(tmp_path / folder / "op.py")
        files[-1].write_text("from part_of_it import OP\n")
        load_op(str(files[-1]))
    for file in files:
        report = check_apart(f"{file}:OP", quick=True, only=["determinism"])
        assert report.answer.startswith(f"{file.parent.name}: ")

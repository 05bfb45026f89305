"""Records of proofs: when one holds, when it is out of date, what is proved today."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from nearlight.core.cuda_sources import libcudacxx, package_versions
from nearlight.core.versions import versions
from nearlight.workbench import record
from nearlight.workbench.check import list_ops
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import PROPERTIES

TWINS = Path(__file__).with_name("twins.py")


@pytest.fixture
def own_op(tmp_path: Path):
    """An op in a folder of its own, with a device file and a header beside it."""
    file = tmp_path / "scale.py"
    # Two files with ops of one name do not live in one process.
    own = f"twins_{tmp_path.name}"
    text = TWINS.read_text(encoding="utf-8").replace("twins::", f"{own}::")
    file.write_text(text.replace("torch.ops.twins.", f"torch.ops.{own}."), encoding="utf-8")
    (tmp_path / "scale.cu").write_text('#include "scale.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "scale.cuh").write_text("#include <nearlight/reduce.cuh>\n")
    return load_op(str(file))


def saved(op, folder: Path, **changes) -> None:
    rows = [{"property": prop.name, "status": "passed"} for prop in PROPERTIES]
    good = {"schema": record.SCHEMA, "op": op.name, "passed": True, "properties": rows}
    record.save({**good, "sources": record.sources(op), **changes}, folder)


def test_sources_hold_the_file_its_device_file_and_the_headers_they_include(own_op):
    assert record.sources(own_op).keys() - package_versions().keys() == {
        "nearlight/core/include/nearlight/reduce.cuh",
        "scale.cu",
        "scale.cuh",
        "scale.py",
    }


def test_a_record_of_cuda_holds_for_the_versions_that_bring_its_compiler_and_headers(
    own_op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved(own_op, tmp_path)
    assert record.stale(own_op, tmp_path) == "" and package_versions().items() <= (
        record.sources(own_op).items()
    )
    newer = {**package_versions(), "nvidia-cuda-cccl": "99.0"}
    monkeypatch.setattr(record.cuda_sources, "package_versions", lambda: newer)
    assert record.stale(own_op, tmp_path) == "nvidia-cuda-cccl differs from what was proved"
    assert not newer.keys() & record.sources(load_op("rms_norm")).keys()


def test_every_header_in_reach_of_a_device_file_is_a_source(tmp_path: Path):
    texts = {
        "my_op.py": "CU = 'cu/k.cu'\n",
        "far/real.cu": '#include/**/"a.h"\n#inclu\\\nde "b.h"\n#include "l.h"\n',
        "cu/a.h": "\xe9",
        "cu/b.h": "#include <cuda_fp16.h>\n",
        "cu/c.h": "",
        "far/real.h": '#include "c.h"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
    (tmp_path / "cu" / "k.cu").symlink_to(tmp_path / "far" / "real.cu")
    (tmp_path / "cu" / "l.h").symlink_to(tmp_path / "far" / "real.h")
    names = {f"cu/{name}" for name in ("a.h", "b.h", "c.h", "k.cu", "l.h")}
    found = record.file_sources(tmp_path / "my_op.py").keys()
    assert found == {*names, "my_op.py", *package_versions()}


@pytest.mark.skipif(libcudacxx() is None, reason="CUB comes with an extra")
def test_a_record_of_a_kernel_with_cub_holds(own_op, tmp_path: Path):
    (tmp_path / "scale.cuh").write_text("#include <cub/block/block_reduce.cuh>\n")
    saved(own_op, tmp_path)
    assert record.stale(own_op, tmp_path) == ""


def test_a_header_that_only_the_compiler_knows_never_lets_a_record_hold(own_op, tmp_path: Path):
    (tmp_path / "scale.cuh").write_text("#include HEADER\n")
    saved(own_op, tmp_path)
    assert record.stale(own_op, tmp_path) == (
        "scale.cu includes a header by a macro, which only the compiler can follow"
    )


def test_sources_of_a_users_file_hold_what_it_imports_and_names_beside_it(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    for name in ("kernels/__init__.py", "kernels/tiles.py", "shared.py", "other.py", "math.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "kernels" / "axpy.cu").write_text("// \n")
    file = tmp_path / "my_op.py"
    file.write_text(
        "import json\nimport shared\nfrom kernels import tiles\nCU = 'kernels/axpy.cu'\n"
    )
    assert record.file_sources(file).keys() - package_versions().keys() == {
        "kernels/__init__.py",
        "kernels/axpy.cu",
        "kernels/tiles.py",
        "my_op.py",
        "shared.py",
    }
    (tmp_path / "kernels" / "tiles.py").write_text("from . import axpy\nfrom ..other import y\n")
    assert {"other.py"} <= record.file_sources(file).keys()
    file.write_text("x = = 3\n")
    assert list(record.file_sources(file)) == ["my_op.py"]


def test_sources_hold_what_is_imported_from_the_users_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("pack/ops", "elsewhere", "site-packages"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/ops/__init__.py", "pack/factory.py", "elsewhere/far.py"):
        (tmp_path / name).touch()
    (tmp_path / "pack" / "factory.py").write_text("import pack.deep\nimport far\nimport torch\n")
    (tmp_path / "pack" / "deep.py").write_text("from nearlight.ops.rms_norm import rms_norm\n")
    file = tmp_path / "pack" / "ops" / "my_op.py"
    file.write_text("import json\nfrom ..factory import make\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert list(record.file_sources(file)) == [
        "../../elsewhere/far.py",
        "../__init__.py",
        "../deep.py",
        "../factory.py",
        "__init__.py",
        "my_op.py",
        *(n for n in record.sources(load_op("rms_norm"))),
    ]


def test_a_users_record_holds_for_its_versions_and_only_if_it_can_be_read(tmp_path: Path):
    path = record.beside(str(tmp_path / "my_op.py:MINE"))
    assert path == tmp_path.resolve() / ".nearlight" / "proofs" / "my_op.MINE.json"
    assert {path, record.beside(str(tmp_path / "my_op.py:MINE"), "cuda:1")} == {
        path, path.with_name("my_op.MINE.cuda1.json"),
    }  # fmt: skip
    rows = [{"property": prop.name, "status": "passed"} for prop in PROPERTIES]
    good = {"schema": record.SCHEMA, "passed": True, "properties": rows, "sources": {"a": "1"}}
    good |= {"device": "cpu", "versions": versions()}
    record.write(good, path)
    assert record.outdated(path, {"a": "1"}, False, "cpu") == ""
    assert record.outdated(path, {"a": "2"}, False, "cpu") == "a differs from what was proved"
    record.write({**good, "versions": {**versions(), "torch": "1.0"}}, path)
    assert record.outdated(path, {"a": "1"}, False, "cpu").startswith("torch was 1.0 and is ")
    record.write({"device": "cpu", "versions": versions(), "schema": record.SCHEMA}, path)
    for text in (path.read_text(), "{", "[]"):
        path.write_text(text)
        assert record.outdated(path, {}, True, "cpu") == "it has no record that can be read"
    path.unlink()
    assert record.outdated(path, {}, True, "cpu") == "it has no record that can be read"


def test_sources_of_an_op_folder_hold_all_its_files():
    names = list(record.sources(load_op("linear_cross_entropy")))
    folder = record.PACKAGE / "ops" / "linear_cross_entropy"
    assert {f"nearlight/ops/linear_cross_entropy/{f.name}" for f in folder.glob("*.py")} <= {*names}
    assert all(name.startswith("nearlight/ops/") for name in names)


def test_line_endings_do_not_count_and_a_changed_character_does(own_op, tmp_path: Path):
    before = record.sources(own_op)
    file = tmp_path / "scale.py"
    text = file.read_bytes()
    file.write_bytes(text.replace(b"\n", b"\r\n"))
    assert record.sources(own_op) == before
    file.write_bytes(text + b"# x\n")
    assert record.sources(own_op) != before


def test_a_record_holds_until_a_source_changes(own_op, tmp_path: Path):
    folder = tmp_path / "proofs"
    assert record.stale(own_op, folder) == "it was never proved"
    saved(own_op, folder)
    assert record.stale(own_op, folder) == ""
    (tmp_path / "scale.cuh").write_text("// changed\n")
    assert "scale.cuh differs" in record.stale(own_op, folder)


def test_a_failed_or_older_proof_does_not_hold(own_op, tmp_path: Path):
    saved(own_op, tmp_path, passed=False)
    assert record.stale(own_op, tmp_path) == "its last proof failed"
    saved(own_op, tmp_path, schema=0)
    assert "schema 0" in record.stale(own_op, tmp_path)
    saved(own_op, tmp_path, properties=[])
    assert record.stale(own_op, tmp_path).startswith("values, layouts, ")


def test_the_draw_follows_from_the_date_alone():
    names = ["rms_norm", "layer_norm", "swiglu", "rope", "linear_cross_entropy"]
    day = datetime.date(2030, 1, 2)
    assert record.drawn_today(names, date=day) == record.drawn_today(names[::-1], date=day)
    days = (day + datetime.timedelta(days=n) for n in range(40))
    drawn = [record.drawn_today(names, date=d) for d in days]
    assert all(len(set(pair)) == 2 for pair in drawn)
    assert {name for pair in drawn for name in pair} == set(names)


def test_due_are_changed_ops_and_the_drawn(own_op, tmp_path: Path):
    reasons = record.due({own_op.name: own_op}, tmp_path)
    assert reasons == {own_op.name: "it was never proved"}
    saved(own_op, tmp_path)
    assert record.due({own_op.name: own_op}, tmp_path) == {own_op.name: "drawn by date"}


def test_the_ops_are_listed_with_signature_and_proof():
    report = list_ops()
    row = next(row for row in report.rows if row["op"] == "rms_norm")
    assert row["signature"].startswith("rms_norm(x, weight=None, eps=1e-06")
    assert row["proof"] == "proved" or row["proof"].startswith("out of date: ")
    assert (row["proof"] == "proved") == (row["out_of_date"] == "")
    assert report.answer.startswith(f"{len(report.rows)} ops, ")


def test_a_reason_in_brief_counts_the_sources():
    stale = {"schema": record.SCHEMA, "sources": {"ops/a.py": "1", "ops/b.py": "1"}}
    for now, brief in (({"ops/a.py": "1"}, "1 source differs"), ({}, "2 sources differ")):
        reason = record._outdated(stale, now, quick=False)
        assert "ops/b.py" in reason and record.in_brief(reason) == brief
    assert record.in_brief("its last proof failed") == "its last proof failed"

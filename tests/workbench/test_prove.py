"""Proofs in child processes: records, failures, deaths and budgets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nearlight
from nearlight.core.errors import BadInput
from nearlight.core.op import Case
from nearlight.workbench import prove, record
from nearlight.workbench.apart import check_apart
from nearlight.workbench.check_report import NOT_APPLICABLE, Header, Row, as_report
from nearlight.workbench.load import load_op
from nearlight.workbench.new import new
from nearlight.workbench.properties import PROPERTIES

TWINS = Path(__file__).with_name("twins.py")


WriteOp = Callable[..., Path]


@pytest.mark.slow
def test_an_op_is_proved_in_a_child_and_its_record_kept(tmp_path: Path):
    failed = prove.prove_all([str(TWINS)], jobs=1, folder=tmp_path)
    assert failed == {}
    kept = json.loads((tmp_path / "scale (sound).json").read_text(encoding="utf-8"))
    assert kept["passed"]
    assert [row["property"] for row in kept["properties"]] == [prop.name for prop in PROPERTIES]
    assert {row["status"] for row in kept["properties"]} <= {"passed", "not applicable"}
    assert kept["machine_code"]["sm_90"]["kernels"][0]["registers"] > 0
    assert kept["sources"] == record.sources(load_op(str(TWINS)))
    assert "torch" in kept["versions"]
    assert record.stale(load_op(str(TWINS)), tmp_path) == ""


def test_a_child_that_dies_is_a_failure_with_its_signal(tmp_path: Path, write_op: WriteOp):
    at_import = write_op("dies", top="os.kill(os.getpid(), signal.SIGSEGV)")
    failed = prove.prove_all([str(at_import)], jobs=1, folder=tmp_path / "proofs")
    assert ": ended by SIGSEGV at dies.py:7 in <module>" in failed[str(at_import)]
    assert not (tmp_path / "proofs").exists()


def test_an_op_of_ours_is_held_to_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(record.stale, "__defaults__", (tmp_path,))
    op = load_op("rms_norm")
    rows = [{"property": prop.name, "status": "passed"} for prop in PROPERTIES]
    good = {"schema": record.SCHEMA, "op": op.name, "passed": True, "properties": rows}
    record.save({**good, "sources": record.sources(op)}, tmp_path)
    for given in ("rms_norm", op):
        nearlight.assert_proved(given)
    record.save({**good, "sources": {}}, tmp_path)
    for given in ("rms_norm", op):
        with pytest.raises(
            AssertionError, match="rms_norm.*differs from what was proved; run `make prove`"
        ):
            nearlight.assert_proved(given)


def test_an_op_of_the_users_is_proved_once(write_op: WriteOp, monkeypatch: pytest.MonkeyPatch):
    file = write_op()
    checks: list[str] = []

    def counted(source, *arguments):
        checks.append(source)
        return check_apart(source, *arguments)

    monkeypatch.setattr(prove, "check_apart", counted)
    for _ in range(2):
        nearlight.assert_proved(str(file), quick=True)
        nearlight.assert_proved(f"{file}:OP", quick=True)
    nearlight.assert_proved(load_op(str(file)), quick=True)
    assert checks == [str(file)]
    kept = json.loads((file.parent / ".nearlight/proofs/twice.OP.json").read_text())
    assert kept["passed"] and kept["op"] == "twice" and kept["sources"].keys() == {"twice.py"}
    path = record.beside(str(file))
    assert record.outdated(path, kept["sources"], True, "cpu") == ""
    assert record.outdated(path, kept["sources"], False, "cpu").endswith("was never proved")
    assert (
        record.outdated(path, kept["sources"], True, "cuda") == "it was proved on cpu, this is cuda"
    )
    write_op(body="os._exit(7)")
    with pytest.raises(AssertionError) as caught:
        nearlight.assert_proved(str(file), quick=True)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("twice: 0 of ")
    assert lines[1] == "values: ended the process with exit code 7"
    assert f"reproduce('{file}:OP', 'values'" in lines[2]
    assert json.loads((file.parent / ".nearlight/proofs/twice.OP.json").read_text()) == kept
    assert len(checks) == 2


def test_what_was_not_run_without_a_gpu_is_said_each_time_and_kept(tmp_path, monkeypatch):
    new("unrun_gain", "cuda", tmp_path)
    file = tmp_path / "unrun_gain.py"
    told = re.escape(str(file)) + r"(:OP)?: values, layouts, poison not run: needs a GPU"
    for op in (str(file), str(file), load_op(f"{file}:OP")):  # the first is proved
        with pytest.warns(UserWarning, match=f"{told}; the rest is proved"):
            nearlight.assert_proved(op, quick=True)
    kept = json.loads((tmp_path / ".nearlight/proofs/unrun_gain.OP.json").read_text())
    found = {row["property"]: row["status"] for row in kept["properties"]}
    assert found == {
        **dict.fromkeys(("values", "layouts", "poison"), "not run"),
        "machine code": "passed",
    }
    with pytest.warns(UserWarning, match="in memory: values, layouts, poison not run"):
        nearlight.assert_proved(replace(load_op(str(file)), name="in memory"), quick=True)
    # On a machine with a GPU such a record proves nothing.
    path = record.beside(str(file))
    assert (
        record.outdated(path, kept["sources"], True, "cuda") == "it was proved on cpu, this is cuda"
    )
    # Of an op without builds, which names nothing to compile, nothing is proved.
    bare = replace(load_op(str(file)), name="in memory", builds=lambda arch: [])
    with pytest.warns(UserWarning, match="in memory: values, layouts, poison .*; nothing is prov"):
        nearlight.assert_proved(bare, quick=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AssertionError, match=f"{told}; one is here: .*device='cuda'"):
        nearlight.assert_proved(str(file), quick=True)


def test_each_property_that_takes_a_gpu_is_warned_of_though_values_were_run(write_op: WriteOp):
    op = replace(load_op(str(write_op())), name="in memory")
    told = "in memory: size, determinism not run: the record names no builds to scan.*; the interp"
    cases = [Case("one row", {"rows": 1, "columns": 1}, torch.float32)]
    with pytest.warns(UserWarning, match=told):
        nearlight.assert_proved(replace(op, check_cases=cases))


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(write_op: WriteOp):
    file = write_op()
    (file.parent / ".nearlight").write_text("a file")
    with pytest.warns(UserWarning, match="the proof is not kept"):
        nearlight.assert_proved(str(file), quick=True)


def test_a_record_in_memory_is_proved_in_this_process(write_op: WriteOp):
    op = load_op(str(write_op()))
    nearlight.assert_proved(replace(op, name="in memory"), quick=True)
    wrong = replace(op, function=lambda x: 3 * x)
    with pytest.raises(AssertionError, match="broken: values"):
        nearlight.assert_proved(wrong, quick=True)


def test_what_cannot_be_proved_is_bad_input(tmp_path: Path, write_op: WriteOp):
    for source, complaint in (
        ("rms_nrm", "no op called"),
        (str(tmp_path / "absent.py"), "no file"),
        (str(write_op("broken", top="x = = 3")), "SyntaxError"),
    ):
        with pytest.raises(BadInput, match=complaint):
            nearlight.assert_proved(source, quick=True)


def test_a_record_says_what_a_kernel_takes_and_which_arch_refuses_it():
    assert prove.machine_code(load_op(f"{TWINS}:REFUSES_ARCH"), "sm_75") == {
        "refused": "needs sm_80",
        "kernels": [],
    }
    (kernel,) = prove.machine_code(load_op(str(TWINS)), "sm_90")["kernels"]
    assert kernel["kernel"] == "_scale_fwd_kernel" and 0 < kernel["registers"] < 64
    assert kernel["constants"]["BLOCK_M"] == "8"


def test_where_nothing_could_be_judged_nothing_is_recorded_as_proved():
    header = Header("gain", "gain.py", False, "cpu", "", {})
    row = Row(1, "values", NOT_APPLICABLE, 0, "the cases have no size", "", 0.0)
    kept = prove._record(as_report(header, [row]), {}, {}, "cpu")
    assert not kept["passed"] and prove._reasons(kept) == "no property could be judged"
    kept = prove._record(as_report(header, [row, replace(row, status="passed")]), {}, {}, "cpu")
    assert kept["passed"] and prove._reasons(kept) == ""


def test_the_command_line_fails_when_an_op_does():
    command = [sys.executable, "-m", "nearlight.workbench.prove", "absent_op"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "0 of 1 ops proved" in run.stdout

"""Proofs in child processes: records, failures, deaths and budgets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nearlight.workbench import prove
from nearlight.workbench.check import load_op
from nearlight.workbench.properties import PROPERTIES

TWINS = Path(__file__).with_name("twins.py")


def test_an_op_is_proved_in_a_child_and_its_record_kept(tmp_path: Path):
    failed = prove.prove_all([str(TWINS)], jobs=1, folder=tmp_path)
    assert failed == {}
    kept = json.loads((tmp_path / "scale (sound).json").read_text(encoding="utf-8"))
    assert kept["passed"]
    assert [row["property"] for row in kept["properties"]] == [prop.name for prop in PROPERTIES]
    assert {row["status"] for row in kept["properties"]} <= {"passed", "not applicable"}
    assert kept["machine_code"]["sm_90"]["kernels"][0]["registers"] > 0
    assert kept["machine_code"]["sm_90"]["violations"] == []
    assert "torch" in kept["versions"]
    prove.assert_proved(str(TWINS), tmp_path)
    (tmp_path / "scale (sound).json").unlink()
    with pytest.raises(AssertionError, match="never proved; run `make prove`"):
        prove.assert_proved(str(TWINS), tmp_path)


def test_a_child_that_dies_is_a_failure_with_its_signal(tmp_path: Path):
    file = tmp_path / "dies.py"
    file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    failed = prove.prove_all([str(file)], jobs=1, folder=tmp_path)
    assert failed[str(file)].startswith("ended by SIGSEGV")
    assert not list(tmp_path.glob("*.json"))


def test_a_broken_budget_fails_the_proof():
    op = load_op(f"{TWINS}:TIGHT")
    code = prove._machine_code(op, "sm_90")
    assert "registers per thread, allowed 8" in code["violations"][0]


def test_an_arch_may_be_refused_only_where_that_is_said():
    op = load_op(f"{TWINS}:REFUSES_ARCH")
    assert prove._machine_code(op, "sm_75")["refused"] == "needs sm_80"
    assert "does not compile for sm_80" in prove._machine_code(op, "sm_80")["violations"][0]


def test_the_command_line_fails_when_an_op_does():
    command = [sys.executable, "-m", "nearlight.workbench.prove", "absent_op"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "0 of 1 ops proved" in run.stdout

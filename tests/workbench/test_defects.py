"""Planted defects: `check` names each by the one property that must, and passes its sound twin."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nearlight
from nearlight.workbench.apart import check_apart
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import PROPERTIES

TABLE = runpy.run_path(str(Path(__file__).parent / "defects" / "table.py"))
DEFECTS = TABLE["DEFECTS"]
WITHOUT_GPU = [defect for defect in DEFECTS if not defect.needs_gpu]
WITH_GPU = [defect for defect in DEFECTS if defect.needs_gpu]
RESULTS = Path(nearlight.__file__).parent / "data" / "results" / "h200" / "defects.json"
# What a defect of this property does to the process that meets it.
MAY_CRASH = ("size",)
# What is read in machine code, of which each row says how much.
READ = ("size", "determinism", "machine code")


def name(defect) -> str:
    return f"{defect.file}:{defect.record}"


def test_there_are_enough_in_both_languages():
    assert len(DEFECTS) >= 24
    assert sum(defect.language == "CUDA C++" for defect in DEFECTS) >= 8
    assert len({name(defect) for defect in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("defect", WITHOUT_GPU, ids=name)
def test_the_property_that_must_names_it(defect):
    if defect.property in MAY_CRASH:
        report = check_apart(defect.target, only=[defect.property])
    else:
        report = check(load_op(defect.target), only=[defect.property])
    (row,) = report.rows
    assert row["status"] == "failed", row
    assert defect.words in row["reason"]


@pytest.mark.parametrize("defect", [d for d in WITH_GPU if d.language == "CUDA C++"], ids=name)
def test_what_only_a_gpu_shows_is_never_passed_without_one(defect):
    report = check(load_op(defect.target), only=[p.name for p in PROPERTIES if p.name not in READ])
    assert not {row["status"] for row in report.rows} - {"not applicable"}
    assert all(row.get("needs_gpu") for row in report.rows if row["property"] != "sanitizer")
    assert report.proof is not None and not report.proof.passed
    assert report.proof.verdict == "incomplete"


def test_to_be_run_elsewhere_is_no_failure_of_the_command_line():
    target = next(defect.target for defect in WITH_GPU if defect.language == "CUDA C++")
    command = [sys.executable, "-m", "nearlight", "check", target, "--only", "values"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "nothing is proved here: values needs a GPU" in told and "proof incomplete" in told


@pytest.mark.slow
@pytest.mark.parametrize("file", ["scale.py", "softmax.py", "norm.py", "pack.py", "center.py"])
def test_the_sound_twin_has_every_property(file):
    report = check(load_op(str(TABLE["FOLDER"] / file)))
    assert report.proof is not None and report.proof.passed, report.rows


def test_the_script_for_a_gpu_writes_what_the_last_test_reads(tmp_path):
    script, target = TABLE["FOLDER"] / "run.py", tmp_path / "defects.json"
    options = ["--device", "cpu", "--only", "pack.py:RETURNED_ALIAS", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(target.read_text("utf-8"))["rows"]
    assert row["status"] == "failed" and row["sound"] == "passed" and row["caught"] is True
    assert (row["property"], row["expected"]) == ("torch", "returns an alias")


@pytest.mark.parametrize("defect", WITH_GPU, ids=name)
def test_what_only_a_gpu_shows_was_caught_on_one(defect):
    """By `defects/run.py`, whose rows are committed; one GPU says so where it takes two."""
    rows = {row["record"]: row for row in json.loads(RESULTS.read_text("utf-8"))["rows"]}
    row = rows[name(defect)]
    assert (row["property"], row["expected"]) == (defect.property, defect.words)
    if defect.num_gpus > 1 and row["status"] == "not run":
        assert row["reason"] == f"needs {defect.num_gpus} GPUs"
        return
    assert row["status"] == "failed" and defect.words in row["reason"]
    assert row["sound"] == "passed" and row["caught"]

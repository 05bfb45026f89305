"""Each property finds its planted faults; together with `test_check` the sound twin passes all."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from nearlight.workbench.check import check, load_op

TWINS = Path(__file__).with_name("twins.py")


def twin(fault: str):
    return sys.modules[load_op(f"{TWINS}").reference.__module__].twin(fault)


def failures(op, *only: str) -> dict[str, str]:
    report = check(op, only=only or None)
    return {row["property"]: row["reason"] for row in report.rows if row["status"] == "failed"}


@pytest.mark.parametrize(
    ("fault", "prop", "words"),
    [
        ("no tail mask", "poison", "wrote 0 bytes past the end"),
        ("one past the end", "poison", "wrote 0 bytes past the end"),
        ("unwritten row", "poison", "never written"),
        ("input in place", "lifecycle", "x was changed"),
        ("sums in bf16", "values", "gradient of weight"),
        ("assumes contiguous upstream", "layouts", "gradient of x"),
        ("ignores upstream", "values", "gradient of x"),
        ("wrong factor", "values", "gradient of x"),
        ("upstream overwritten", "lifecycle", "changed the upstream gradient 0"),
        ("backward writes into its input", "lifecycle", "the backward changed x"),
        ("same memory for two calls", "lifecycle", "two calls is the same memory"),
        ("loses double backward", "lifecycle", "silently wrong second derivative"),
        ("second backward differs", "lifecycle", "another gradient of x, silently"),
        ("no weight gradient when x is frozen", "lifecycle", "gradient of weight: missing"),
        ("empty batch leaves garbage", "extremes", "NaN"),
    ],
)
def test_each_fault_is_named(fault: str, prop: str, words: str):
    found = failures(twin(fault), prop)
    assert words in found.get(prop, "nothing found")


def test_an_output_that_shares_memory_with_an_input_is_named():
    def alias(x, weight):
        return x.view_as(x) if torch.is_grad_enabled() else x.clone()

    op = dataclasses.replace(twin(""), function=alias, reference=lambda x, weight: x.clone())
    assert failures(op, "lifecycle") == {"lifecycle": "output 0 shares its memory with x"}


def test_a_missing_output_and_a_wrong_dtype_are_named():
    op = twin("")

    def pair(x, weight):
        return x * weight, x + weight

    two = dataclasses.replace(op, reference=pair)
    assert failures(two, "values") == {"values": "1 outputs, the reference has 2"}
    wide = dataclasses.replace(op, function=lambda x, weight: (x * weight).double())
    assert failures(wide, "values") == {
        "values": "output: dtype torch.float64, the reference gives torch.float32"
    }


def test_a_declared_refusal_passes_and_is_said():
    report = check(load_op(f"{TWINS}:REFUSES"), only=["layouts"])
    assert report.proof is not None and report.proof.passed
    assert "refuses" in report.rows[0]["reason"]
    assert "call x.contiguous()" in report.rows[0]["reason"]


def test_an_undeclared_refusal_fails():
    found = failures(load_op(f"{TWINS}:UNDECLARED"), "layouts")
    assert found["layouts"].startswith("raised ValueError: x: strides")


def test_an_unknown_family_of_layouts_is_an_error_of_the_record():
    found = failures(load_op(f"{TWINS}:UNKNOWN_FAMILY"), "layouts")
    assert "diagonal" in found["layouts"]


def test_extremes_of_the_record_are_proved():
    report = check(load_op(f"{TWINS}:WITH_EXTREMES"), only=["extremes"])
    assert report.proof is not None and report.proof.passed
    found = failures(load_op(f"{TWINS}:MISSES_ERROR"), "extremes")
    assert "the right answer is ValueError" in found["extremes"]

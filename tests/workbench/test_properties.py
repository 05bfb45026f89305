"""Each property finds its planted faults; together with `test_check` the sound twin passes all."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from nearlight.core.op import Case
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import extremes, size
from nearlight.workbench.trial import Trial

TWINS = Path(__file__).with_name("twins.py")


def twin(fault: str):
    return sys.modules[load_op(f"{TWINS}").reference.__module__].twin(fault)


def failures(op, *only: str) -> dict[str, str]:
    report = check(op, only=only or None)
    return {row["property"]: row["reason"] for row in report.rows if row["status"] == "failed"}


@pytest.mark.parametrize(
    ("fault", "prop", "words"),
    [
        ("no tail mask", "poison", "wrote right past the end"),
        ("one past the end", "poison", "wrote right past the end"),
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
    assert failures(two, "values") == {"values": "1 output, the reference has 2"}
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


def test_errors_are_not_provoked_on_a_gpu():
    op = load_op(f"{TWINS}:MISSES_ERROR")
    steps = [
        {trial.step for trial in extremes.trials(op, False, device)} for device in ("cpu", "cuda")
    ]
    assert steps[0] - steps[1] == {"wrong width"} and steps[1] < steps[0]


def test_size_holds_the_last_rows_to_the_reference_of_those_rows():
    trial = Trial(Case("40x16", {"rows": 40, "columns": 16}, torch.float32))
    assert size.examine(twin(""), trial, "cpu") == ""
    assert size.examine(twin("wrong factor"), trial, "cpu").startswith("last rows of gradient of x")

    def wraps_around(x, weight):  # as an int32 offset does: the last row is that of another place
        good = x * weight
        return torch.cat([good[:-1], good[:1]])

    op = dataclasses.replace(
        twin(""), function=wraps_around, reference=lambda x, weight: x * weight
    )
    assert size.examine(op, trial, "cpu").startswith("last rows of output 0")


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("rms_norm", {"rows": 20, "N": 24}),
        ("linear_cross_entropy", {"BT": 20, "H": 16, "V": 40}),
    ],
)
def test_the_large_cases_of_our_ops_hold_in_small(op: str, case: dict[str, int]):
    record = load_op(op)
    for large in record.large_cases:
        assert math.prod(large.shape.values()) > 2**31
        options = {k: v for k, v in large.options.items() if k != "memory_budget_bytes"}
        small = dataclasses.replace(large, shape=case, dtype=torch.float32, options=options)
        assert size.examine(record, Trial(small), "cpu") == ""


def test_rows_of_zeros_and_masks_of_one_value_are_tried_unasked():
    """Of an op whose record names no extreme; the reference has the right answer."""

    def masked(x, mask, backend="auto"):
        return torch.where(mask, x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6), 0.0)

    def make_inputs(case, device, generator):
        x = torch.randn(case.shape["rows"], case.shape["columns"], generator=generator)
        return {"x": x.to(case.dtype).requires_grad_(), "mask": torch.arange(x.shape[1]) > 0}

    def wrong_for_zeros(x, mask, backend="auto"):
        return masked(x, mask) + (x == 0).all(-1, keepdim=True)

    def wrong_without_any(x, mask, backend="auto"):
        return masked(x, mask) if mask.any() else x

    sound = dataclasses.replace(
        twin(""), function=masked, reference=masked, make_inputs=make_inputs
    )
    assert failures(sound, "extremes") == {}
    for wrong, words in (
        (wrong_for_zeros, "a row of zeros in x: "),
        (wrong_without_any, "mask all False: "),
    ):
        found = failures(dataclasses.replace(sound, function=wrong), "extremes")
        assert found["extremes"].startswith(words)

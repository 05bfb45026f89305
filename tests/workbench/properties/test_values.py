"""Property 1 on inputs and outputs of unusual kinds: fp8, fp64 alone, no sizes."""

from __future__ import annotations

import pytest
import torch

from nearlight.core.op import Case
from nearlight.workbench.check import check


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_outputs_in_fp8_are_judged(plain_op, failures, dtype):
    def quantize(x):
        return (2 * x).to(dtype)

    assert failures(plain_op(quantize)) == {}
    assert "output" in failures(plain_op(lambda x: (2 * x - x.abs()).to(dtype), quantize))["values"]


def test_an_op_in_fp64_alone_is_held_to_what_fp64_errs(plain_op, failures):
    def softmax(x):
        return torch.softmax(x, -1)

    def narrow(x):
        return torch.softmax(x.float(), -1).double()

    assert failures(plain_op(softmax, dtype=torch.float64)) == {}
    report = check(plain_op(softmax, dtype=torch.float64))
    proved = {row["property"] for row in report.rows if row["status"] == "passed"}
    assert proved >= {"values", "layouts", "shapes", "lifecycle", "extremes", "poison", "torch"}
    found = failures(plain_op(narrow, softmax, dtype=torch.float64), "values", "lifecycle")
    assert found["values"].startswith("output: ") and "lifecycle" in found


def test_a_case_in_fp64_beside_others_is_held_to_fp64(plain_op, failures):
    def scaled(x):
        return x * 0.1

    def narrow(x):  # right in every other dtype
        return (x.double() * 0.100000001).to(x.dtype) if x.dtype == torch.float64 else x * 0.1

    cases = [Case(str(d), {"N": 9}, d) for d in (torch.float32, torch.float64)]
    assert failures(plain_op(scaled, check_cases=cases)) == {}
    assert failures(plain_op(narrow, scaled, check_cases=cases), "values")["values"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_number_in_fp64_leaves_results_in_bf16_as_they_are(plain_op, failures, asks):
    def make_inputs(case, device, generator):
        x = torch.randn(*case.shape.values(), generator=generator, device=device).to(case.dtype)
        scale = torch.tensor(0.7, dtype=torch.float64, device=device).requires_grad_(asks)
        return {"x": x.requires_grad_(), "scale": scale}

    def scaled(x, scale):
        return x * scale

    made = {"make_inputs": make_inputs, "dtype": torch.bfloat16}
    assert failures(plain_op(scaled, **made)) == {}
    found = failures(plain_op(lambda x, scale: x * scale * 2, scaled, **made), "values")
    assert found["values"].startswith("output: largest error over its row's scale 1.")
    found = failures(plain_op(lambda x, scale: x.double() * scale, scaled, **made), "values")
    assert found["values"] == "output: dtype torch.float64, the reference gives torch.bfloat16"


def test_an_op_of_no_sizes_is_proved(plain_op, failures):
    def make_inputs(case, device, generator):
        return {"x": torch.randn((), generator=generator).requires_grad_()}

    cases = [Case("scalar", {}, torch.float32)]
    sound = plain_op(lambda x: x.sin(), make_inputs=make_inputs, check_cases=cases)
    statuses = {row["property"]: row["status"] for row in check(sound).rows}
    assert "failed" not in statuses.values() and statuses["shapes"] == "not applicable"
    assert statuses["values"] == statuses["lifecycle"] == statuses["torch"] == "passed"
    wrong = plain_op(
        lambda x: x.tan(), lambda x: x.sin(), make_inputs=make_inputs, check_cases=cases
    )
    assert failures(wrong, "values")["values"].startswith("output: ")


def test_a_changed_input_comes_before_what_is_wrong_after_it(plain_op, failures):
    def doubles_x_too(x):
        x.detach().mul_(2)
        return x * 1.0

    found = failures(plain_op(doubles_x_too, lambda x: x * 1.0), "values", "lifecycle")
    assert found["values"].startswith("the forward changed x in place; output: ")
    assert "under no_grad x was changed in place" in found["lifecycle"]

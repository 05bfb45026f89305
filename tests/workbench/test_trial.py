"""Trials: inputs by seed, upstream gradients that are not flat, gradients by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nearlight.core.errors import BadInput
from nearlight.core.op import Case
from nearlight.workbench.load import load_op
from nearlight.workbench.trial import (
    UPSTREAM,
    Rejected,
    Result,
    Trial,
    held_to,
    make_inputs,
    make_upstream,
    run,
    standard,
)

OP = load_op(str(Path(__file__).with_name("twins.py")))
CASE = Case("5x33", {"rows": 5, "columns": 33}, torch.float32)


def test_equal_trials_give_equal_inputs_and_other_seeds_others():
    first = make_inputs(OP, Trial(CASE), "cpu")
    again, other = make_inputs(OP, Trial(CASE), "cpu"), make_inputs(OP, Trial(CASE, 1), "cpu")
    assert torch.equal(first["x"], again["x"]) and not torch.equal(first["x"], other["x"])


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [("scale 1e-3", 0, 1e-3), ("scale 1e3", 0, 1e3), ("mean 30, std 0.01", 30, 0.01)],
)
def test_values_change_the_first_differentiable_input(values: str, mean: float, std: float):
    inputs = make_inputs(OP, Trial(CASE, values=values), "cpu")
    assert inputs["x"].mean().item() == pytest.approx(mean, abs=0.3 * std)
    assert inputs["x"].std().item() == pytest.approx(std, rel=0.3)
    assert inputs["x"].requires_grad and inputs["x"].is_leaf


def test_an_option_reaches_the_function_if_it_takes_it():
    def function(x, weight, flag=False):
        return x * weight

    def make(case, device, generator):
        assert case.options["layout"] == "packed"
        return OP.make_inputs(case, device, generator)

    op = replace(OP, function=function, make_inputs=make)
    case = replace(CASE, options={"flag": True, "layout": "packed"})
    assert make_inputs(op, Trial(case), "cpu").keys() == {"x", "weight", "flag"}

    def takes_any(x, weight, **options):
        return x * weight

    inputs = make_inputs(replace(OP, function=takes_any), Trial(case), "cpu")
    assert inputs.keys() == {"x", "weight", "flag", "layout"}


def test_upstream_gradients_differ_by_row_and_lie_as_asked():
    output = torch.ones(5, 33, requires_grad=True) * 1
    (plain,) = make_upstream([output], Trial(CASE, upstream="per row"))
    norms = plain.norm(dim=1)
    assert norms[2] == 0 and norms[4] > 100 * norms[0]
    (flat,) = make_upstream([output], Trial(CASE, layouts={UPSTREAM: "expanded all"}))
    assert flat.stride() == (0, 0) and flat.shape == (5, 33)
    scalar = make_upstream([output.sum()], Trial(CASE, layouts={UPSTREAM: "expanded dim 0"}))
    assert scalar[0].shape == () and scalar[0] != 1
    assert make_upstream([torch.tensor([1, 2])], Trial(CASE)) == [None]


def test_run_returns_gradients_by_name_and_none_for_unused():
    inputs = make_inputs(OP, Trial(CASE), "cpu")
    result = run(lambda x, weight: 3 * x, inputs, [torch.ones(5, 33)])
    assert torch.equal(result.gradients["x"], torch.full((5, 33), 3.0))
    assert result.gradients["weight"] is None
    assert inputs["x"].grad is None


def test_the_truth_is_in_fp64_on_the_same_values():
    expected = standard(OP, Trial(CASE), "cpu")
    assert expected.truth.outputs[0].dtype == torch.float64
    x, weight = expected.inputs["x"].detach(), expected.inputs["weight"].detach()
    assert torch.equal(expected.truth.outputs[0], x.double() * weight.double())


def test_what_fp64_errs_holds_no_rounding_of_the_inputs():
    """x - 1 is exact in fp32: that x is no number of fp32 is not what the op must answer for."""
    inputs = {"x": torch.tensor([1 + 2.0**-40, 1 + 2.0**-30], dtype=torch.float64)}
    expected = held_to(lambda inputs, upstream: Result([inputs["x"] - 1], {}), inputs, ())
    assert torch.equal(expected.plain.outputs[0], expected.truth.outputs[0])


def test_the_signs_of_the_terms_are_drawn_by_the_trials_seed():
    seeds = {}
    for seed in (0, 1):
        given = standard(OP, Trial(CASE), "cpu")
        signs = []

        def compute(inputs, upstream, signs=signs):
            signs.append(upstream[0].sign())
            return run(OP.reference, inputs, upstream)

        expected = held_to(compute, given.inputs, given.upstream, seed=seed)
        signs.clear()
        terms = expected.terms()
        assert len(signs) == 8
        # Of a product each gradient is one term: its size does not depend on the sign.
        assert torch.allclose(terms["x"], expected.truth.gradients["x"].abs())
        seeds[seed] = torch.stack(signs)
    assert not torch.equal(seeds[0], seeds[1])


def test_terms_that_do_not_fit_in_memory_are_none():
    given = standard(OP, Trial(CASE), "cpu")
    calls = []

    def compute(inputs, upstream):
        calls.append(inputs["x"])
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(OP.reference, inputs, upstream)

    expected = held_to(compute, given.inputs, given.upstream)
    assert expected.terms() == {} and len(calls) == 5
    # The inputs are cast once for all draws of the signs.
    assert len({x.data_ptr() for x in calls[2:]}) == 1


def test_an_input_the_op_does_not_make_is_rejected():
    def make(case, device, generator):
        raise ValueError("columns must be even")

    with pytest.raises(Rejected, match="columns must be even"):
        standard(replace(OP, make_inputs=make), Trial(CASE), "cpu")


@pytest.mark.parametrize("made", [None, (1, 2)])
def test_inputs_that_are_no_dict_are_bad_input(made):
    op = replace(OP, make_inputs=lambda case, device, generator: made)
    message = f"make_inputs returned a {type(made).__name__} for case 5x33, allowed is a dict"
    with pytest.raises(BadInput, match=message):
        make_inputs(op, Trial(CASE), "cpu")


def test_a_reference_that_changes_an_input_in_place_is_bad_input():
    def in_place(x, weight):
        with torch.no_grad():
            weight.mul_(2)
        return x * weight

    with pytest.raises(BadInput, match="the reference changes weight in place"):
        standard(replace(OP, reference=in_place), Trial(CASE), "cpu")

"""What torch asks of an op: each kind of planted fault is named, and sound ops pass."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from nearlight.core.cuda import NoEmulator
from nearlight.core.op import Case
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import torch as prop
from nearlight.workbench.trial import Trial

SMALL = Case("small", {"rows": 4, "columns": 6}, torch.float32)
IN_FP64 = dataclasses.replace(SMALL, dtype=torch.float64)
LIBRARY = torch.library.Library("nearlight_test_torch", "FRAGMENT")


@pytest.fixture(scope="module")
def twins():
    record = load_op(f"{Path(__file__).parents[1] / 'twins.py'}")
    return sys.modules[record.reference.__module__]


@pytest.fixture
def op_of(twins):
    """Return `(function, reference) -> Op` over the inputs of the twins."""

    def make(function, reference=None, cases=(SMALL,)):
        reference = reference or twins.reference
        fields = {"function": function, "reference": reference, "check_cases": cases}
        return dataclasses.replace(twins.twin(""), **fields)

    return make


def found(op, step: str) -> str:
    """Return the first fault that a step finds, "" if none; there must be such a trial."""
    chosen = [trial for trial in prop.trials(op, False, "cpu") if trial.step == step]
    assert chosen
    return next((reason for trial in chosen if (reason := prop.examine(op, trial, "cpu"))), "")


def multiply(x, weight):
    return (x * weight).contiguous()


def fake(x, weight):
    return x.new_empty(x.shape)


def backward(factor):
    def differentiate(ctx, g):
        x, weight = ctx.saved_tensors
        return factor * g * weight, (g * x).sum(0)

    return differentiate


RIGHT = backward(1.0)


def defined(name, implementation=multiply, fake=fake, backward=RIGHT):
    """Register a torch op of x and weight, and return it."""
    LIBRARY.define(f"{name}(Tensor x, Tensor weight) -> Tensor")
    LIBRARY.impl(name, implementation, "CPU")
    qualified = f"nearlight_test_torch::{name}"
    if fake is not None:
        torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified,
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=LIBRARY,
        )
    return getattr(torch.ops.nearlight_test_torch, name)


def shifted(x, weight):
    weight.add_(1)
    return x * weight


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        # Right for contiguous inputs, as such faults are.
        ({"fake": lambda x, weight: torch.empty_like(x)}, "wrong fake stride (the kernel's, then"),
        ({"fake": lambda x, weight: fake(x, weight).half()}, "wrong fake dtype (the kernel's, the"),
        ({"fake": lambda x, weight: x.new_empty(x.shape[::-1])}, "wrong fake shape"),
        ({"fake": None}, "no fake"),
        ({"fake": lambda x, weight: x.new_empty(int(x.sum()))}, "GuardOnDataDependentSymNode"),
        ({"implementation": shifted}, "undeclared mutation: Argument weight"),
        ({"implementation": lambda x, weight: x}, "returns an alias: Argument x"),
        ({"backward": None}, "no autograd"),
    ],
)
def test_opcheck_names_the_fault_of_a_registration(op_of, request, fields, words):
    index = request.node.callspec.id.rpartition("fields")[2].partition("-")[0]
    op = op_of(defined(f"opcheck_{index}", **fields))
    reason = found(op, "opcheck")
    expected = f"opcheck: nearlight_test_torch::opcheck_{index}: {words}"
    assert reason.startswith(expected) if words else reason == ""
    assert "\n" not in reason


def test_ops_below_a_hand_written_function_need_no_autograd_of_their_own(op_of):
    forward = defined("below_fwd", backward=None)
    back = defined("below_bwd", backward=None)

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return forward(x, weight)

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return back(g, weight), (g * x).sum(0)

    assert found(op_of(Multiply.apply), "opcheck") == ""


def test_a_kernel_outside_any_torch_op_is_named(op_of, twins):
    op = op_of(lambda x, weight: twins._forward(x.detach(), weight.detach(), ""))
    reason = found(op, "opcheck")
    assert reason.startswith("opcheck: _scale_fwd_kernel is launched outside any torch op")
    assert "register_op" in reason


def test_the_sound_twin_passes_every_step(twins):
    op = twins.twin("")
    steps = [trial.step for trial in prop.trials(op, False, "cpu")]
    assert set(steps) == {"opcheck", "compile", "autocast", "DTensor"}
    assert [found(op, step) for step in dict.fromkeys(steps)] == [""] * 4


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1.0, ""), (1.002, "gradcheck: Jacobian mismatch for output 0 with respect to input x")],
)
def test_gradcheck_finds_a_gradient_slightly_wrong(op_of, factor, reason):
    op = op_of(defined(f"factor_{int(1000 * factor)}", backward=backward(factor)),
               cases=(SMALL, IN_FP64))  # fmt: skip
    assert found(op, "gradcheck") == reason
    assert found(op, "opcheck") == ""  # which is why there is a gradcheck


def test_gradcheck_takes_small_sizes_where_the_op_has_them(op_of):
    wide = dataclasses.replace(IN_FP64, shape={"rows": 4, "columns": 600})
    op = op_of(multiply, cases=(SMALL, wide))
    (trial,) = [trial for trial in prop.trials(op, False, "cpu") if trial.step == "gradcheck"]
    assert trial.case.shape == {"rows": 4, "columns": 7}

    def refuse(case, device, generator):
        if case.shape["columns"] == 7:
            raise ValueError("columns: allowed are even sizes")
        return op.make_inputs(case, device, generator)

    def odd(x, weight):
        if x.shape[1] == 7:
            raise ValueError("x: allowed are even sizes")
        return multiply(x, weight)

    for field in ({"make_inputs": refuse}, {"function": odd}):
        trials = prop.trials(dataclasses.replace(op, **field), False, "cpu")
        assert [t.case.shape["columns"] for t in trials if t.step == "gradcheck"] == [600]


def branch(x, weight):
    return x * weight if x.sum() > 1e9 else weight * x


def test_a_branch_on_data_is_named_with_its_line(op_of):
    reason = found(op_of(branch), "compile")
    assert reason.startswith("compile: graph break: Data-dependent branching; at test_torch.py, ")
    assert reason.endswith(": return x * weight if x.sum() > 1e9 else weight * x")


def test_a_graph_per_row_count_is_named(op_of):
    seen = {}

    def keeps_by_size(x, weight):
        scale = seen.setdefault(x.shape[0], 1.0)
        return x * weight * scale

    reason = found(op_of(keeps_by_size), "compile")
    assert reason == "compile: 3 graphs for rows 4, 5, 9: recompiles per row count"


def test_row_counts_that_an_op_refuses_are_not_tried(op_of):
    tried = set()

    def takes_multiples_of_four(x, weight):
        if x.shape[0] % 4:
            raise ValueError("x: allowed are multiples of 4 rows")
        tried.add(x.shape[0])
        return x * weight

    op = op_of(takes_multiples_of_four)
    assert found(op, "compile") == ""
    assert tried == {4, 12}


def test_other_results_and_errors_of_the_compiled_op_are_named(op_of):
    def differs(x, weight):
        return x * weight * (2 if torch.compiler.is_compiling() else 1)

    assert found(op_of(differs), "compile").startswith("compile: with rows 4: output")
    no_fake = op_of(defined("compiled_without_fake", fake=None))
    reason = found(no_fake, "compile")
    assert reason == "compile: graph break: Operator does not support running with fake tensors"


def project(x, weight):
    return torch.nn.functional.linear(x, weight.expand(3, -1))


def test_under_autocast_both_ways_are_right_and_others_are_not(op_of):
    def keeps_fp32(x, weight):
        with torch.autocast("cpu", enabled=False):
            return project(x, weight)

    def strict(x, weight):
        cast = x @ torch.eye(x.shape[1], dtype=x.dtype)
        if cast.dtype != weight.dtype:
            raise TypeError(f"weight is {weight.dtype}\nand x is not")
        return project(x, weight)

    assert found(op_of(project, project), "autocast") == ""
    assert found(op_of(keeps_fp32, project), "autocast") == ""
    crash = found(op_of(strict, project), "autocast")
    assert crash == "autocast: TypeError: weight is torch.float32"
    wrong = found(op_of(lambda x, weight: project(x, weight).half(), project), "autocast")
    assert wrong.startswith("autocast: output: dtype torch.float16, the reference gives")


def test_dtensors_are_taken_rightly_or_refused_in_words(op_of):
    def refuses(x, weight):
        if hasattr(x, "to_local"):
            raise TypeError("multiply: got a DTensor, allowed are local tensors")
        return x * weight

    def obscure(x, weight):
        if hasattr(x, "to_local"):
            raise ValueError("expected a pointer")
        return x * weight

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    assert found(op_of(multiply), "DTensor") == ""
    assert found(op_of(refuses), "DTensor") == ""
    assert found(op_of(defined("no_strategy")), "DTensor") == ""
    assert found(op_of(obscure), "DTensor") == "DTensor: ValueError: expected a pointer"
    takes_the_shard = op_of(lambda x, weight: local(x) * local(weight))
    assert found(takes_the_shard, "DTensor").startswith("DTensor: a plain tensor comes back")
    wrong = op_of(lambda x, weight: x * weight * (2 if hasattr(x, "to_local") else 1))
    assert found(wrong, "DTensor").startswith("DTensor: output")


def test_the_process_group_is_left_as_it_was(op_of):
    dist = torch.distributed
    assert found(op_of(multiply), "DTensor") == ""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert found(op_of(multiply), "DTensor") == ""
        assert dist.is_initialized() and dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_what_needs_a_gpu_to_run_is_not_called_failed(op_of):
    def on_a_gpu(x, weight):
        raise NoEmulator("CUDA C++ runs on a GPU")

    op = op_of(defined("on_a_gpu", on_a_gpu))
    for trial in prop.trials(op, False, "cpu"):
        if trial.step == "DTensor":
            continue  # refused before anything runs
        with pytest.raises(NoEmulator):
            prop.examine(op, trial, "cpu")


def test_an_unknown_step_is_an_error_that_lists_them(op_of):
    with pytest.raises(ValueError, match="allowed are opcheck, gradcheck, compile"):
        prop.examine(op_of(multiply), Trial(SMALL, step="trace"), "cpu")


def test_the_steps_of_a_gpu_are_tried_on_one(op_of, monkeypatch):
    make_inputs = prop.make_inputs
    monkeypatch.setattr(
        prop, "make_inputs", lambda op, trial, device: make_inputs(op, trial, "cpu")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    steps = {trial.step for trial in prop.trials(op_of(multiply), False, "cuda")}
    assert {*prop.GPU_STEPS, *prop.DEVICE_STEPS} <= steps
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    steps = {trial.step for trial in prop.trials(op_of(multiply), False, "cuda")}
    assert not {*prop.DEVICE_STEPS} & steps

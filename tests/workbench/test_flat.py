"""Lists of tensors among an op's inputs are proved like single ones."""

from __future__ import annotations

import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.op import Case, Extreme
from nearlight.workbench import bench
from nearlight.workbench.check import check
from nearlight.workbench.trial import Trial, make_inputs
from nearlight.workbench.work import Machine


def two_matrices(case, device, generator):
    shape = tuple(case.shape.values())
    first, second = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(2))
    return {"xs": [first, second], "power": 2}


def product(xs, power):
    assert isinstance(xs, list)
    return xs[0] * xs[1] ** power


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b**2

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b**2, g * a * b


def test_each_tensor_of_a_list_is_an_input_of_its_own(plain_op, failures):
    sound = plain_op(product, make_inputs=two_matrices)
    assert list(make_inputs(sound, Trial(sound.check_cases[0]), "cpu")) == [
        "xs[0]",
        "xs[1]",
        "power",
    ]
    assert failures(sound, "values", "layouts", "lifecycle", "torch") == {}
    wrong = plain_op(lambda xs, power: Product.apply(*xs), product, make_inputs=two_matrices)
    found = failures(wrong, "values", "lifecycle")
    assert found["values"].startswith("gradient of xs[1]: ")
    assert found["values"].endswith("it is 0.5 times what is right")


def test_a_bench_case_that_a_cpu_cannot_make_hides_no_gradient(plain_op, failures):
    def make_small(case, device, generator):
        if case.name == "large" and device.type == "cpu":
            raise ValueError("large runs on a GPU alone")
        return two_matrices(case, device, generator)

    wrong = plain_op(
        lambda xs, power: Product.apply(*xs),
        product,
        make_inputs=make_small,
        cases=[Case("large", {"rows": 1, "columns": 1}, torch.float32)],
    )
    assert failures(wrong, "values")["values"].startswith("gradient of xs[1]: ")


def test_layouts_of_a_list_are_tried_and_refused_by_its_name(plain_op, failures):
    def refuses(xs, power):
        if not all(x.is_contiguous() for x in xs):
            raise ValueError("xs: allowed are contiguous tensors")
        return product(xs, power)

    op = plain_op(refuses, product, make_inputs=two_matrices)
    assert failures(op, "layouts")["layouts"].startswith("raised ValueError: xs: allowed")
    kinds = ["transposed", "sliced", "strided", "expanded"]
    declared = plain_op(
        refuses, product, make_inputs=two_matrices, refused_layouts={"xs": kinds, "upstream": kinds}
    )
    assert failures(declared, "layouts") == {}


def test_an_extreme_of_the_record_sees_the_list(plain_op):
    def zeros(inputs):
        return {**inputs, "xs": [torch.zeros_like(x).requires_grad_() for x in inputs["xs"]]}

    op = plain_op(product, make_inputs=two_matrices)
    extreme = Extreme("all zeros", op.check_cases[0], zeros)
    op = plain_op(product, make_inputs=two_matrices, extremes=[extreme])
    (row,) = check(op, only=["extremes"]).rows
    assert row["status"] == "passed" and row["num_trials"] > 4


def test_the_op_and_its_peers_are_timed_with_the_list(plain_op, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(bench, "MIN_REPEATS", 2)
    op = plain_op(product, make_inputs=two_matrices, peers={"other": lambda: product})
    machine = Machine("cpu", find_gpu("h200"))
    rows = bench.measure(op, machine, ["other"], op.check_cases[:1])
    timed = [row for row in rows if row["implementation"] in (bench.OURS, "other")]
    assert len(timed) == 8
    for row in timed:
        is_host = row["case"].startswith("host cost")
        assert row["check"] == ("" if is_host else "held to float64 reference")
        assert row["host_us" if is_host else "time_us"] > 0

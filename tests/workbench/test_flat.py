"""Lists of tensors among an op's inputs are proved like single ones."""

from __future__ import annotations

import torch

from nearlight.core.op import Extreme
from nearlight.workbench.check import check
from nearlight.workbench.flat import flattened
from nearlight.workbench.trial import Trial, make_inputs


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
    assert list(make_inputs(flattened(sound), Trial(sound.check_cases[0]), "cpu")) == [
        "xs[0]",
        "xs[1]",
        "power",
    ]
    assert failures(sound, "values", "layouts", "lifecycle", "torch") == {}
    wrong = plain_op(lambda xs, power: Product.apply(*xs), product, make_inputs=two_matrices)
    found = failures(wrong, "values", "lifecycle")
    assert found["values"].startswith("gradient of xs[1]: ")
    assert found["values"].endswith("it is 0.5 times what is right")


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


def test_a_peer_is_called_with_the_list(plain_op):
    op = flattened(plain_op(product, make_inputs=two_matrices, peers={"other": lambda: product}))
    inputs = make_inputs(op, Trial(op.check_cases[0]), "cpu")
    assert torch.equal(op.peers["other"]()(**inputs), op.reference(**inputs))


def test_an_op_without_lists_stays_itself(plain_op):
    op = plain_op(lambda x: 2 * x)
    assert flattened(op) is op

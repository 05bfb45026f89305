"""Property 5: what a loss, a caller or a setting of torch's does around an op."""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd.function import once_differentiable

from nearlight.workbench.check import check


class Square(torch.autograd.Function):
    """A backward of plain tensors, as most hand-written ones are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


def test_a_backward_that_raises_when_differentiated_is_sound(plain_op, failures):
    assert failures(plain_op(Square.apply, lambda x: x * x), "lifecycle") == {}


def pair(is_none: bool, is_wrong: bool):
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(not is_none)
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx, first, second):
            if is_none and (first is None or second is None) and not is_wrong:
                return 2 * first if second is None else 3 * second
            if is_wrong and not is_none and not second.any():
                return 3 * first
            return 2 * first + 3 * second

    return Pair.apply


@pytest.mark.parametrize("is_none", [True, False])
def test_a_loss_of_one_of_two_outputs_is_tried(plain_op, failures, is_none):
    def reference(x):
        return 2 * x, 3 * x

    assert failures(plain_op(pair(is_none, False), reference), "lifecycle") == {}
    found = failures(plain_op(pair(is_none, True), reference), "lifecycle")["lifecycle"]
    kind = "raised TypeError" if is_none else "gradient of x from output 0 alone: "
    assert found.startswith(kind)


def test_gradients_that_make_inputs_does_not_ask_for_are_tried(plain_op, failures):
    def make_inputs(case, device, generator):
        return {name: torch.randn(*case.shape.values(), generator=generator) for name in "xy"}

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, factor):
            ctx.save_for_backward(x, y)
            ctx.factor = factor
            return x * y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y, ctx.factor and g * x * ctx.factor, None

    def op(function):
        return plain_op(function, lambda x, y: x * y, make_inputs=make_inputs)

    def reason(function) -> str:
        (row,) = check(op(function), only=["lifecycle"]).rows
        assert row["status"] == "passed"
        return row["reason"]

    assert "the gradient of x, y is proved here alone" in reason(lambda x, y: x * y)
    text = reason(lambda x, y: Product.apply(x, y, None))
    assert "no gradient of y" in text and "the gradient of x is proved here alone" in text
    wrong = failures(op(lambda x, y: Product.apply(x, y, 2)), "lifecycle")
    assert wrong["lifecycle"].startswith("gradient of y: ")

    def refuses(x, y):
        if x.requires_grad or y.requires_grad:
            raise ValueError("x, y: no gradient, call detach()")
        return x * y

    assert "gradient" not in reason(refuses)


def test_another_default_dtype_changes_nothing(plain_op, failures):
    def scaled(x):
        return x * torch.full((1,), 0.1)

    def sound(x):
        return x * torch.full((1,), 0.1, dtype=torch.float32)

    assert failures(plain_op(sound), "lifecycle") == {}
    found = failures(plain_op(scaled), "lifecycle")["lifecycle"]
    assert found.startswith("under torch.set_default_dtype(torch.float64): output: dtype")
    assert torch.get_default_dtype() == torch.float32


def squares(keep_by, what="input"):
    """x² of each tensor of a list, with what the backward needs kept one way or another."""

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *xs):
            ys = tuple(x * x if what == "input" else x.exp() for x in xs)
            kept = xs if what == "input" else ys
            if keep_by == "save_for_backward":
                ctx.save_for_backward(*kept)
            else:
                ctx.kept = [t.clone() for t in kept] if keep_by == "copy" else list(kept)
            return ys

        @staticmethod
        @once_differentiable
        def backward(ctx, *gs):
            kept = ctx.saved_tensors if keep_by == "save_for_backward" else ctx.kept
            return tuple(
                (2 if what == "input" else 1) * g * k for g, k in zip(gs, kept, strict=True)
            )

    return Squares.apply


@pytest.mark.parametrize("what", ["input", "output"])
@pytest.mark.parametrize("keep_by", ["save_for_backward", "copy", "attribute"])
def test_what_is_overwritten_before_the_backward_is_not_used(plain_op, failures, keep_by, what):
    def plain(x):
        return x * x if what == "input" else x.exp()

    function = squares(keep_by, what)
    found = failures(plain_op(lambda x: function(x)[0], plain), "lifecycle")
    if keep_by == "attribute":
        written = "x" if what == "input" else "output 0"
        assert found["lifecycle"].startswith(
            f"gradient of x, {written} overwritten before the backward: "
        )
    else:
        assert found == {}


def test_each_tensor_of_a_list_is_overwritten(plain_op, failures):
    def make_inputs(case, device, generator):
        shape = tuple(case.shape.values())
        return {"xs": [torch.randn(shape, generator=generator).requires_grad_() for _ in "ab"]}

    def op(keep_by):
        function = squares(keep_by)
        return plain_op(
            lambda xs: function(*xs), lambda xs: tuple(x * x for x in xs), make_inputs=make_inputs
        )

    assert failures(op("save_for_backward"), "lifecycle") == {}
    found = failures(op("attribute"), "lifecycle")["lifecycle"]
    assert found.startswith("gradient of xs[0], xs[0] overwritten before the backward: ")


@pytest.mark.parametrize(
    ("name", "change", "read"),
    [
        (
            "torch.set_default_dtype",
            lambda: torch.set_default_dtype(torch.float64),
            torch.get_default_dtype,
        ),
        ("torch.set_grad_enabled", lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
        (
            "torch.set_float32_matmul_precision",
            lambda: torch.set_float32_matmul_precision("medium"),
            torch.get_float32_matmul_precision,
        ),
        (
            "torch.use_deterministic_algorithms",
            lambda: torch.use_deterministic_algorithms(True),
            torch.are_deterministic_algorithms_enabled,
        ),
        ("os.chdir", lambda: os.chdir("/"), os.getcwd),
        (
            "torch.manual_seed",
            lambda: torch.manual_seed(0),
            lambda: torch.get_rng_state().tolist(),
        ),
    ],
)
def test_what_a_call_leaves_set_is_named_and_set_back(plain_op, failures, name, change, read):
    def leaves(x):
        change()
        return x * x

    before = read()
    # Other properties come first, and meet the op before this one does.
    found = failures(plain_op(leaves, lambda x: x * x), "layouts", "lifecycle")["lifecycle"]
    assert found.startswith("a call ") and name in found
    if name != "torch.manual_seed":
        assert read() == before


def test_a_call_may_draw_random_numbers_and_set_things_for_itself(plain_op, failures):
    def sound(x):
        torch.rand(3)
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(former)
        return x * x

    assert failures(plain_op(sound, lambda x: x * x), "lifecycle") == {}


def test_what_plain_torch_cannot_add_up_is_no_fault_of_an_op(plain_op):
    def double(x):
        return (2 * x.float()).to(x.dtype)

    (row,) = check(plain_op(double, dtype=torch.float8_e4m3fn), only=["lifecycle"]).rows
    assert row["status"] == "passed", row
    assert "no gradients were added up, as plain PyTorch cannot: " in row["reason"]

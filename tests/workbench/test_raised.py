"""What an exception says about an op: the line that tells, and what torch means by it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nearlight.core.cost import Cost
from nearlight.core.register import register_op
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.raised import describe

OP = load_op(str(Path(__file__).with_name("twins.py")))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("k.cu does not compile:\n\nk.cu(3): error: no ';'\n  x\n", "k.cu(3): error: no ';'"),
        (
            "k.cu(3): warning: old\nk.cu(4): catastrophic error: cannot open source file \"a.h\"",
            'k.cu(4): catastrophic error: cannot open source file "a.h"',
        ),
        ("at 4:2:\n  x = c(y)\n      ^\nNameError('c')", "NameError('c') (at 4:2 of the kernel)"),
        ("first\nsecond", "first"),
    ],
)  # fmt: skip
def test_of_a_compilers_message_the_line_that_tells_is_said(message, told):
    assert describe(ValueError(message), OP, "cpu") == f"ValueError: {told}"


def test_a_backward_with_too_few_gradients_is_told_how_many_are_needed():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, dy):
            return dy

    op = dataclasses.replace(OP, function=lambda x, weight: Scale.apply(x, weight))
    rows = check(op, only=["values", "torch"]).rows
    assert rows[0]["reason"].startswith(
        "raised RuntimeError: the backward returned 1 gradient, needed are 2: one for each "
        "argument of its forward, in order, or None; x, weight require one"
    )
    assert rows[1]["same_as"] == "values"


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "None, its annotation says a list of tensors: is there a return?"),
        (torch.ones(2), "a tensor, its annotation says a list of tensors"),
        ([None], "a list of something else, its annotation says a list of tensors"),
        (3.5, "float, its annotation says a list of tensors"),
    ],
)
def test_what_an_implementation_returned_by_mistake_is_told_with_its_place(returned, told):
    def backward(dy: torch.Tensor) -> list[torch.Tensor]:
        return returned

    back = register_op("raised_tests::back", backward, fake=lambda dy: [dy], cost=lambda *_: Cost())
    line = backward.__code__.co_firstlineno
    with pytest.raises((RuntimeError, TypeError)) as caught:
        back(torch.ones(2))
    assert describe(caught.value, OP, "cpu") == (
        f"{caught.type.__name__}: backward (test_raised.py:{line}) returned {told}"
    )


def test_a_tuple_for_a_tensor_is_told():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x, x

    op = register_op("raised_tests::there", forward, fake=lambda x: x, cost=lambda *_: Cost())
    with pytest.raises(RuntimeError) as caught:
        op(torch.ones(2))
    assert "returned a tuple, its annotation says a tensor" in describe(caught.value, OP, "cpu")


def test_an_error_of_the_same_words_inside_an_implementation_is_its_own():
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Unable to cast 3.5 to Tensor")

    op = register_op("raised_tests::own", forward, fake=lambda x: x, cost=lambda *_: Cost())
    with pytest.raises(RuntimeError) as caught:
        op(torch.ones(2))
    assert describe(caught.value, OP, "cpu").startswith("RuntimeError: Unable to cast 3.5 to")

"""What functions return: dicts, dataclasses and plain numbers are compared, the rest is refused."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from nearlight.core.errors import BadInput
from nearlight.workbench.returned import differing, form_of, parts_of

X, Y = torch.zeros(2), torch.ones(3)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    loss: torch.Tensor
    steps: int = 3


def form(returned):
    return form_of(dict(parts_of(returned)))


@pytest.mark.parametrize(
    ("returned", "places"),
    [
        (X, [""]),
        ((X, [Y, None]), ["[0]", "[1][0]", "[1][1]"]),
        ({"y": Y, "a": X}, ["['a']", "['y']"]),
        (Pair(X, Y), ["[0]", "[1]"]),
        (Output(X), [".loss", ".steps"]),
        (torch.max(torch.eye(2), dim=0), ["[0]", "[1]"]),
    ],
)
def test_every_part_has_a_place(returned, places):
    assert [place for place, _ in parts_of(returned)] == places


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (X, (X,), "output[0]: nothing, the reference gives a tensor"),
        ({"a": X}, {"b": X}, "output['b']: nothing, the reference gives a tensor"),
        ((X, 3), (X, 4), "output[1]: 3, the reference gives 4"),
        ((X, None), (X, 2.5), "output[1]: None, the reference gives 2.5"),
        ((X, "mean"), (X, "sum"), "output[1]: 'mean', the reference gives 'sum'"),
        ([X, 3], (Y, 3), ""),
        ((X, 3.5), (X, 2.5), ""),  # what rounds is held to the tolerance rule
    ],
)
def test_what_differs_in_kind_is_named_with_its_place(ours, theirs, words):
    assert differing(form(ours), form(theirs)) == words


def test_what_cannot_be_compared_is_bad_input():
    with pytest.raises(BadInput, match=r"returned a set at \[1\]; allowed are tensors, numbers"):
        list(parts_of((X, {1})))


@pytest.mark.parametrize(
    ("wrap", "wrap_reference", "words"),
    [
        (lambda y: {"y": y + 4}, lambda y: {"y": y}, "output: largest error"),
        (lambda y: (y, {"aux": y + 4}), lambda y: (y, {"aux": y}), "output 1: largest error"),
        (lambda y: {"b": y, "a": 2 * y}, lambda y: {"a": 2 * y, "b": y}, None),
        (lambda y: (y, 3.5), lambda y: (y, 2.5), "output[1]: largest error"),
        (lambda y: (y, 1 / 3), lambda y: (y, torch.tensor(1 / 3).item()), None),
        (lambda y: (y, 4), lambda y: (y, 3), "output[1]: 4, the reference gives 3"),
    ],
)
def test_check_compares_all_that_is_returned(plain_op, failures, wrap, wrap_reference, words):
    op = plain_op(lambda x: wrap(x * x), lambda x: wrap_reference(x * x))
    found = failures(op, "values").get("values")
    assert found is None if words is None else found.startswith(words)


def test_a_reference_without_a_tensor_fails_everywhere(plain_op, failures):
    op = plain_op(lambda x: None)
    told = "the reference returns no tensor, so there is nothing to compare"
    assert failures(op, "values", "layouts") == {"values": told, "layouts": f"x contiguous: {told}"}


def test_shapes_are_compared_before_they_are_differentiated(plain_op, failures):
    op = plain_op(lambda x: x.sum().view(1, 1), lambda x: x.sum())
    assert failures(op, "values")["values"] == "output: shape (1, 1), the reference gives ()"

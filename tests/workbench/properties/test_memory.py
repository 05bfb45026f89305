"""Property 10: more memory than the record declares is named, with both numbers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from nearlight.core.errors import BadInput
from nearlight.core.op import Case
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op

TWINS = Path(__file__).parents[1] / "twins.py"


def scale(**fields):
    twin = sys.modules[load_op(f"{TWINS}").reference.__module__].twin("")
    return dataclasses.replace(twin, **fields)


def test_more_than_declared_is_named_with_both_numbers():
    op = scale()
    assert check(op, only=["memory"]).rows[0]["status"] == "passed"
    sound = op.function

    def keeps_a_copy(x, weight):
        copy = x.detach().clone()
        return sound(x, weight) + 0 * copy.sum()

    row = check(dataclasses.replace(op, function=keeps_a_copy), only=["memory"]).rows[0]
    assert row["status"] == "failed" and "declares 0" in row["reason"]
    roomy = scale(function=keeps_a_copy, extra_bytes=lambda case: 3 * 4 * _elements(case))
    assert check(roomy, only=["memory"]).rows[0]["status"] == "passed"


def _elements(case: Case) -> int:
    return case.shape["rows"] * case.shape["columns"]


@pytest.mark.parametrize("declared", [None, -5, 0.5])
def test_what_is_no_number_of_bytes_is_bad_input(declared):
    message = rf"scale.*: extra_bytes of case .* returned {declared}, allowed is a whole number"
    with pytest.raises(BadInput, match=message):
        check(scale(extra_bytes=lambda case: declared), only=["memory"])


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda kept, x, y: kept.append(y.detach()), "output 0"),
        (lambda kept, x, y: kept.append(x.detach()), "x"),
        (lambda kept, x, y: (kept.clear(), kept.append(y)), ""),  # one call is a cache
    ],
)
def test_memory_that_grows_with_the_calls_is_a_leak(plain_op, failures, keep, words):
    kept = []

    def twice(x):
        y = 2 * x
        keep(kept, x, y)
        return y

    reason = failures(plain_op(twice, lambda x: 2 * x), "memory").get("memory", "")
    assert reason == (f"after each of 4 calls stays in memory: {words}" if words else "")

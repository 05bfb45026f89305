"""Options of a case: what nobody takes is bad input, and not dropped."""

from __future__ import annotations

import pytest
import torch

from nearlight.core.errors import BadInput
from nearlight.core.op import Case
from nearlight.workbench.options import accepted, noting


def case_of(**options) -> Case:
    return Case("5x33", {"rows": 5, "columns": 33}, torch.float32, options)


def test_a_misspelt_option_is_bad_input_with_the_nearest(plain_op):
    op = plain_op(lambda x, casting="none": x)
    case, options = noting(case_of(castign="llama"))
    with pytest.raises(BadInput, match=r"option 'castign', which its function .* nearest: casting"):
        accepted(op, case, options)


@pytest.mark.parametrize(
    "read",
    [
        lambda options: options["layout"],
        lambda options: options.get("layout"),
        lambda options: "layout" in options,
        lambda options: dict(**options),
        lambda options: {**options},
        lambda options: options | {},
        lambda options: list(options.items()),
        lambda options: list(options.values()),
        lambda options: dict(options),
    ],
)
def test_what_make_inputs_reads_need_not_be_accepted(plain_op, read):
    op = plain_op(lambda x, flag=False: x)
    given = case_of(layout="packed", flag=True)
    case, options = noting(given)
    assert case == given
    read(case.options)
    assert accepted(op, case, options) == {"flag": True}


def test_what_make_inputs_asks_for_in_vain_is_not_there(plain_op):
    _, options = noting(case_of())
    assert options.get("layout", "none") == "none" and not options and "x" not in options

from __future__ import annotations

import pytest
import torch

from nearlight.ops._linear_record import case_of, gradients_of, make_inputs, refuse_turing, sizes


def test_a_case_makes_rows_of_every_kind_and_the_parts_it_names():
    case = case_of(50, 64, 33, torch.float32, ("bias",), softcap=3.0)
    assert case.name == "BT50 H64 V33 bias softcap=3.0"
    assert (sizes(case), gradients_of(case)) == ((50, 33, 64), (True, True, True))
    inputs = make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert inputs.keys() == {"x", "weight", "labels", "bias", "softcap"}
    kind = torch.arange(50) % 5
    assert ((inputs["labels"] == -100) == (kind == 2)).all()
    p = (inputs["x"] @ inputs["weight"].t()).softmax(-1)
    sure = p[kind == 1].gather(1, inputs["labels"][kind == 1, None])
    assert sure.median() > 0.99
    sizes_of_x = [inputs["x"][kind == each].abs().mean().item() for each in (2, 0, 3)]
    assert sizes_of_x[0] < 0.01 < sizes_of_x[1] < 10 < sizes_of_x[2]


def test_without_a_bias_it_gets_no_gradient():
    assert gradients_of(case_of(1, 2, 3)) == (True, True, False)


def test_turing_is_refused_and_what_came_later_is_not():
    refuse_turing("some_op", "sm_80")
    with pytest.raises(ValueError, match="some_op.*sm_80 or later"):
        refuse_turing("some_op", "sm_75")

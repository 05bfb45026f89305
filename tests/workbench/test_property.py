"""Which cases a property is tried on: covers, tile edges, derived sizes."""

from __future__ import annotations

from pathlib import Path

import torch

from nearlight.core.op import Case
from nearlight.workbench.load import load_op
from nearlight.workbench.property import (
    Remarks,
    cover,
    plural,
    remark,
    remark_texts,
    remarked,
    resized,
    tile_edges,
)

OP = load_op(str(Path(__file__).with_name("twins.py")))
CASE = Case("5x33", {"rows": 5, "columns": 33}, torch.float32)


def test_the_cover_holds_every_dtype_and_option_once():
    cases = [
        Case("a", {"n": 64}, torch.float32, {"mode": "x"}),
        Case("b", {"n": 8}, torch.float32, {"mode": "x"}),
        Case("c", {"n": 16}, torch.bfloat16, {"mode": "x"}),
        Case("d", {"n": 32}, torch.float32, {"mode": "y"}),
        Case("e", {"n": 1}, torch.float32, {"mode": "y"}),
    ]
    assert [case.name for case in cover(cases)] == ["b", "c", "d"]


def test_tile_edges_are_those_of_the_kernels_launched():
    assert tile_edges(OP, [CASE], "cpu") == [8, 16]


def test_each_dimension_is_resized_in_turn():
    sizes = [dict(trial.case.shape) for trial in resized(OP, CASE, [7, 9])]
    assert sizes == [
        {"rows": 7, "columns": 33},
        {"rows": 9, "columns": 33},
        {"rows": 5, "columns": 7},
        {"rows": 5, "columns": 9},
    ]


def test_a_remark_stands_once_and_is_lost_where_nobody_listens():
    remark("unheard")
    said: Remarks = {}
    with remarked(said):
        for text, arch in (("one", "sm_80"), ("two", ""), ("one", "sm_90"), ("one", "sm_90")):
            remark(text, arch)
    assert remark_texts(said) == ["one on sm_80, sm_90", "two"]
    assert [plural(number, "kernel") for number in (1, 2)] == ["1 kernel", "2 kernels"]

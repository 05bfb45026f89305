"""Launches: noted with their tiles, also where nothing can run them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nearlight.core.cuda import Kernel, NoEmulator
from nearlight.core.op import Case
from nearlight.workbench.launches import launches
from nearlight.workbench.load import load_op
from nearlight.workbench.trial import Trial, kernels, make_inputs, run

OP = load_op(str(Path(__file__).with_name("twins.py")))
CASE = Case("5x33", {"rows": 5, "columns": 33}, torch.float32)


def test_launches_are_seen_with_their_tiles():
    inputs = make_inputs(OP, Trial(CASE), "cpu")
    with launches() as seen, kernels():
        run(OP.function, inputs, None)
    assert [(name, dict(constants)) for name, constants in seen] == [
        ("_scale_fwd_kernel", {"BLOCK_M": 8, "BLOCK_N": 16})
    ]


def test_launches_of_cuda_are_seen_with_their_block_and_that_nothing_ran_them(tmp_path: Path):
    source = 'extern "C" __global__ void fill(float* y, long n) {}\n'
    (tmp_path / "fill.cu").write_text(source, encoding="utf-8")
    kernel = Kernel(tmp_path / "fill.cu", "fill", defines=(("TILE", "32"), ("T", "float")))
    with launches() as seen, pytest.raises(NoEmulator):
        kernel[(1,), (64, 2)](torch.ones(3), 3)
    assert seen == [("fill", {"BLOCK_X": 64, "BLOCK_Y": 2, "BLOCK_Z": 1, "TILE": 32})]
    assert "on CPU tensors" in seen.not_run
    with launches() as seen:
        assert not seen.not_run

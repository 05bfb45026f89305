"""Inputs that are known to end a process: which they are, and that they are not run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nearlight.core.op import Case
from nearlight.workbench.fatal import Fatal, IsFatal, known_fatal, mark, refuse_fatal
from nearlight.workbench.load import load_op
from nearlight.workbench.property import tile_edges
from nearlight.workbench.trial import Trial

OP = load_op(str(Path(__file__).with_name("twins.py")))
CASE = Case("5x33", {"rows": 5, "columns": 33}, torch.float32)


def test_an_input_that_is_known_to_be_fatal_is_not_run_nor_with_another_layout():
    bent = Trial(CASE, layouts={"x": "transposed"})
    known_fatal.append(Fatal(mark(bent), "ended", "", ""))
    try:
        refuse_fatal(Trial(CASE))
        with pytest.raises(IsFatal, match="ended"):
            refuse_fatal(bent)
        known_fatal.append(Fatal(mark(Trial(CASE)), "hangs", "", ""))
        for trial in (Trial(CASE), Trial(CASE, layouts={"x": "offset"})):
            with pytest.raises(IsFatal, match="hangs"):
                refuse_fatal(trial)
        with pytest.raises(IsFatal, match="hangs"):
            tile_edges(OP, [CASE], "cpu")
        refuse_fatal(Trial(CASE).resized(rows=6))
    finally:
        known_fatal.clear()

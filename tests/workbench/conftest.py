"""A user's op file, as small as it can be, with something planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

OP_FILE = """
import ctypes, os, signal, subprocess, sys, time
import torch
from nearlight.core.cost import Cost
from nearlight.core.op import Case, Op

{top}


def reference(x):
    return 2 * x


def twice(x, backend="auto"):
    {body}
    return 2 * x


def make_inputs(case, device, generator):
    x = torch.randn(*case.shape.values(), generator=generator, device=device)
    return {{"x": x.requires_grad_()}}


OP = Op(
    name="twice",
    function=twice,
    reference=reference,
    make_inputs=make_inputs,
    cases=[],
    check_cases=[
        Case("small", {{"rows": 3, "columns": 5}}, torch.float32),
        Case("tall", {{"rows": 9, "columns": 5}}, torch.float32),
    ],
    cost=lambda case: {{"forward": Cost(), "forward_backward": Cost()}},
    extra_bytes=lambda case: 4096,
)
"""


@pytest.fixture
def write_op(tmp_path: Path) -> Callable[..., Path]:
    """Write an op that doubles; `body` runs in each call, `top` when the file is imported."""

    def write(name: str = "twice", body: str = "pass", top: str = "") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(OP_FILE.format(top=top, body=body), encoding="utf-8")
        return path

    return write

"""A user's op file, as small as it can be, with something planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nearlight.core.cost import Cost
from nearlight.core.op import Case, Op
from nearlight.workbench.check import check

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

FACTORY = """
import dataclasses
from {helpers} import factor
from {base} import OP as BASE

def make(name):
    reference = lambda x: factor * x
    return dataclasses.replace(BASE, name=name, reference=reference)
"""


@pytest.fixture
def write_op(tmp_path: Path) -> Callable[..., Path]:
    """Write an op that doubles; `body` runs in each call, `top` when the file is imported."""

    def write(name: str = "twice", body: str = "pass", top: str = "") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(OP_FILE.format(top=top, body=body), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_package(tmp_path: Path, write_op: Callable[..., Path]) -> Callable[[], Path]:
    """Write a package with an op made by another file of it; return the op's file."""

    def write() -> Path:
        (tmp_path / "kit" / "ops").mkdir(parents=True)
        (tmp_path / "kit" / "__init__.py").touch()
        (tmp_path / "kit" / "ops" / "__init__.py").touch()
        (tmp_path / "kit" / "helpers.py").write_text("factor = 3\n", encoding="utf-8")
        write_op().rename(tmp_path / "kit" / "ops" / "twice.py")
        factory = FACTORY.format(helpers="kit.helpers", base=".ops.twice")
        (tmp_path / "kit" / "factory.py").write_text(factory, encoding="utf-8")
        file = tmp_path / "kit" / "ops" / "thrice.py"
        file.write_text("from ..factory import make\nTHRICE = make('thrice')\n", encoding="utf-8")
        return file

    return write


def one_matrix(case, device, generator):
    """Return x of a case's sizes."""
    wide = max(case.dtype, torch.float32, key=lambda dtype: dtype.itemsize)  # fp8 has no promotion
    x = torch.randn(*case.shape.values(), generator=generator, device=device, dtype=wide)
    return {"x": x.to(case.dtype).requires_grad_()}


@pytest.fixture
def plain_op() -> Callable[..., Op]:
    """Make an op of Python functions: `(function, reference=function, **fields of Op)`."""

    def make(function, reference=None, dtype=torch.float32, **fields) -> Op:
        shapes = ({"rows": 3, "columns": 5}, {"rows": 6, "columns": 7})
        given = {
            "make_inputs": one_matrix,
            "cases": [],
            "check_cases": [Case("small", shape, dtype) for shape in shapes],
            "cost": lambda case: {"forward": Cost(), "forward_backward": Cost()},
            "extra_bytes": lambda case: 1 << 20,
        }
        return Op("plain", function, reference or function, **{**given, **fields})

    return make


@pytest.fixture
def failures() -> Callable[..., dict[str, str]]:
    """Return how an op breaks each property that it breaks: `(op, *names)`."""

    def found(op, *only: str) -> dict[str, str]:
        report = check(op, only=only or None)
        return {r["property"]: r["reason"] for r in report.rows if r["status"] == "failed"}

    return found

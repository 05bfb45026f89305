"""Faults that one tile hides, and reads beyond a tensor whose values are dropped."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from nearlight.core import backend as backends
from nearlight.core.cost import Cost
from nearlight.core.launch import launch_gpu
from nearlight.core.op import Case, Op
from nearlight.core.triton import jit
from nearlight.workbench.check import check


@jit
def _double_kernel(x_ptr, y_ptr, N, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if FAULT == "every program takes the first tile":
        start *= 0
    at = start + tl.arange(0, BLOCK)
    mask = at < N
    if FAULT == "a wide tile loses rows of few elements" and BLOCK == 64:
        mask = mask & (N >= 32)
    if FAULT == "reads without a mask":
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask)
    tl.store(y_ptr + at, 2 * x, mask)


def op_with(fault: str) -> Op:
    def double(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        if not backends.use_triton(backend, x):
            return 2 * x
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # Interpreted, one tile holds all.
        tile = 64 if launch_gpu(x.device) else triton.next_power_of_2(x.numel())
        grid = (triton.cdiv(x.numel(), tile),)
        _double_kernel[grid](x.contiguous(), y, x.numel(), FAULT=fault, BLOCK=tile)
        return y

    case = Case("5x7", {"rows": 5, "columns": 7}, torch.float32)
    return Op(
        name="double",
        function=double,
        reference=lambda x: 2 * x,
        make_inputs=lambda case, device, generator: {
            "x": torch.randn(*case.shape.values(), generator=generator, device=device)
        },
        cases=[case],
        check_cases=[case],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
    )


@pytest.mark.parametrize(
    ("fault", "prop", "words"),
    [
        ("every program takes the first tile", "shapes", "elements are NaN"),
        ("a wide tile loses rows of few elements", "shapes", "elements are NaN"),
        ("reads without a mask", "poison", "read right past the end of x"),
    ],
)
def test_it_is_found_and_shown_by_one_line(fault: str, prop: str, words: str):
    (row,) = check(op_with(fault), only=[prop]).rows
    assert row["status"] == "failed" and words in row["reason"]
    if prop == "shapes":
        assert "step='in the tiles of a GPU'" in row["reproduce"]
    (sound,) = check(op_with(""), only=[prop]).rows
    assert sound["status"] == "passed"
    assert launch_gpu(torch.device("cpu")) is None

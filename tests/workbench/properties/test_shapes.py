"""Property 3: sizes that only together lie beyond a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nearlight.core import backend as backends
from nearlight.core.cost import Cost
from nearlight.core.op import Case
from nearlight.core.register import register_op
from nearlight.core.triton import jit
from nearlight.workbench.check import check

BLOCK_M, BLOCK_N = 8, 16


@jit
def _double_kernel(
    x_ptr, y_ptr, M, N, FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < M) & (columns < N)
    x = tl.load(x_ptr + rows * N + columns, inside, 0.0)
    if FAULT:  # wrong only in tiles that are neither of the first row nor of the first column
        x += tl.where((tl.program_id(0) > 0) & (tl.program_id(1) > 0), 1.0, 0.0)
    tl.store(y_ptr + rows * N + columns, 2 * x, inside)


def double(fault: bool):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y, x = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
            M, N = x.shape
            if x.numel():
                grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
                _double_kernel[grid](x, y, M, N, FAULT=fault, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
            return y

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    return lambda x, backend="auto": Double.apply(x) if backends.use_triton(backend, x) else 2 * x


def test_two_sizes_beyond_their_tiles_together_are_tried(plain_op, failures):
    # Beside so few rows and columns no single size shows the fault.
    cases = [Case("small", {"rows": 3, "columns": 5}, torch.float32)]
    op = plain_op(double(False), lambda x: 2 * x, check_cases=cases)
    assert failures(op, "shapes") == {}
    op = plain_op(double(True), lambda x: 2 * x, check_cases=cases)
    assert failures(op, "shapes")["shapes"].startswith("output: ")


@jit
def _twice_kernel(x_ptr, y_ptr, M, N, AXIS: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(AXIS).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + columns, columns < N, 0.0)
    tl.store(y_ptr + row * N + columns, 2 * x, columns < N)


def twice(axis: int, name: str):
    """A program per row along an axis of the grid."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, device=x.device)
        M, N = x.shape
        grid = (1,) * axis + (M,)
        if x.numel():
            block_n = triton.next_power_of_2(N)
            _twice_kernel[grid](x.contiguous(), y, M, N, AXIS=axis, BLOCK_N=block_n)
        return y

    op = register_op(
        f"tests::{name}",
        forward,
        fake=lambda x: torch.empty(x.shape, device=x.device),
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, g: op(g),
    )
    return lambda x, backend="auto": op(x) if backends.use_triton(backend, x) else 2 * x


def on_cpu(case, device, generator):
    """Draw on the generator's device: without memory for a large case only if nothing is drawn."""
    x = torch.randn(*case.shape.values(), generator=generator, device=generator.device)
    return {"x": x.to(device).requires_grad_()}


def test_grids_of_the_cases_keep_to_what_a_gpu_takes(plain_op, failures):
    large = Case("large", {"rows": 1 << 33, "columns": 8}, torch.float32)
    wide = Case("wide", {"rows": 65_536, "columns": 8}, torch.float32)

    def found(axis: int, **cases):
        op = plain_op(twice(axis, f"twice_{axis}"), lambda x: 2 * x, make_inputs=on_cpu, **cases)
        return failures(op, "shapes").get("shapes", "")

    assert found(0, cases=[wide]) == ""
    assert found(1, cases=[wide]) == (
        "_twice_kernel: grid (1, 65536): axis 1 of a launch takes 0 to 65535"
    )
    assert found(0, cases=[wide], large_cases=[large]).endswith(
        "axis 0 of a launch takes 0 to 2147483647"
    )


def test_an_op_that_reads_values_says_that_its_grids_are_not_known(plain_op):
    case = Case("large", {"rows": 1 << 20, "columns": 1 << 20}, torch.float32)

    def function(x):
        return 2 * x if x.sum().item() > 0 else x + x

    (row,) = check(plain_op(function, lambda x: 2 * x, cases=[case]), only=["shapes"]).rows
    assert row["status"] == "passed"
    assert "the grids of its cases are not known: " in row["reason"]


def test_an_output_that_is_the_input_at_one_size_is_found(plain_op, failures):
    def same(x):
        return x.view_as(x) if x.shape[0] == 1 else x.clone()

    op = plain_op(same, lambda x: x.clone())
    assert failures(op, "shapes") == {"shapes": "output 0 shares its memory with x"}

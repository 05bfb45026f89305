"""Property 3: sizes that only together lie beyond a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nearlight.core import backend as backends
from nearlight.core.op import Case
from nearlight.core.triton import jit

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

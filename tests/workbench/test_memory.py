"""Memory of a call, counted on a CPU inside ops of every kind."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from nearlight.core.cost import Cost
from nearlight.core.register import register_op
from nearlight.core.triton import jit
from nearlight.workbench.memory import extra_bytes, kept
from nearlight.workbench.trial import Result, run

KIBI = 1024


def _in_steps(x: torch.Tensor) -> torch.Tensor:
    first = torch.empty(2 * KIBI, dtype=torch.uint8)
    del first
    second, third = (torch.empty(size * KIBI, dtype=torch.uint8) for size in (1, 3))
    return x + second.sum() * 0 + third.sum() * 0


def _with_workspace(x: torch.Tensor) -> torch.Tensor:
    torch.empty(5 * KIBI, dtype=torch.uint8)
    return x.clone()


workspace_op = register_op(
    "test_memory::workspace(Tensor x) -> Tensor",
    _with_workspace,
    fake=torch.empty_like,
    cost=lambda args, kwargs, out: Cost(),
    backward=lambda ctx, dout: torch.empty(9 * KIBI, dtype=torch.uint8)[:1] * 0 + dout,
)


@torch.library.custom_op("test_memory::custom", mutates_args=())
def custom_op(x: torch.Tensor) -> torch.Tensor:
    return _with_workspace(x)


@jit
def _erf_kernel(y_ptr, x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, tl.erf(tl.load(x_ptr + offsets)))  # interpreted by a torch op


def _by_kernel(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _erf_kernel[(1,)](y, x.detach(), N=256)
    return y


def measure(function, *, upstream: bool = False) -> int:
    x = torch.ones(256, requires_grad=upstream)
    above = [torch.ones(256)] if upstream else None
    found, _ = extra_bytes(lambda: run(function, {"x": x}, above), [x, *(above or ())], "cpu")
    return found


def test_the_peak_is_that_of_what_lives_at_once():
    # the sum's temporaries of 256 floats, the output among them, come after both are made
    assert 4 * KIBI <= measure(_in_steps) <= 6 * KIBI
    assert measure(lambda x: 2 * x) == 0
    assert measure(lambda x: 2 * x + 1) == KIBI


@pytest.mark.parametrize("op", [workspace_op, custom_op])
def test_what_an_op_in_python_allocates_is_seen(op):
    assert measure(op) == 4 * KIBI  # its workspace is gone before the output is made, of 1 KiB


def test_the_backward_is_seen():
    assert measure(workspace_op, upstream=True) >= 7 * KIBI


def test_memory_that_was_given_is_not_taken_off_what_is_needed():
    """Some backwards write dx over the upstream gradient or over an input."""
    x, above = torch.zeros(100, 10), torch.zeros(100, 10)
    out, empty = torch.zeros(100, 10), torch.zeros(0)
    given = [x, above, empty]
    assert kept(Result([out], {"x": out[:50]}), given) == (4000, False)
    assert kept(Result([out], {"x": above.view(-1)}), given) == (4000, True)
    assert kept(Result([x], {"x": None}), given) == (0, True)
    assert kept(Result([torch.zeros(0)], {}), given) == (0, False)


def test_what_the_interpreter_makes_is_not_the_ops():
    assert measure(_by_kernel) == 0

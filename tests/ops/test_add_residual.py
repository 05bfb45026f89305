import pytest
import torch
import triton.language as tl

from nearlight.core.triton import jit
from nearlight.ops._add_residual import add_residual, check_residual, store_dx


@jit
def _add_kernel(
    x_ptr, residual_ptr, sum_ptr, out_ptr, stride, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask, other=0.0).to(tl.float32)
    x = add_residual(x, residual_ptr, sum_ptr, row, cols, stride, N, mask, tl.float32)
    tl.store(out_ptr + row * N + cols, x, mask)


@jit
def _store_kernel(
    dx_ptr, out_ptr, dsum_ptr, dresidual_ptr, stride, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows, cols = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK)
    mask = (rows >= 0)[:, None] & (cols < N)[None, :]
    dx = tl.load(dx_ptr + rows[:, None] * N + cols[None, :], mask, other=0.0)
    store_dx(dx, out_ptr, dsum_ptr, dresidual_ptr, rows, cols, stride, N, mask, tl.float32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_what_is_added_is_read_as_it_is_stored(stream):
    x, residual = random(3, 5).bfloat16(), (7 * random(3, 9)).to(stream)[:, 2:7]
    total, out = torch.empty(3, 5, dtype=stream), torch.empty(3, 5)
    _add_kernel[(3,)](x, residual, total, out, residual.stride(0), N=5, BLOCK=8)
    assert torch.equal(total, residual + x)
    assert torch.equal(out, total.float())


def test_a_gradient_is_added_and_rounded_once_into_each_dtype():
    dx, dsum = random(3, 5), random(3, 9)[:, 2:7]
    half, wide = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(3, 5)
    _store_kernel[(3,)](dx, half, dsum, wide, dsum.stride(0), N=5, BLOCK=8)
    assert torch.equal(wide, dx + dsum) and torch.equal(half, wide.bfloat16())


def test_nothing_is_added_where_nothing_flows_in():
    dx, half = random(3, 5), torch.empty(3, 5, dtype=torch.bfloat16)
    _store_kernel[(3,)](dx, half, None, None, None, N=5, BLOCK=8)
    assert torch.equal(half, dx.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_residual_is_as_x_or_fp32_beside_a_half_one(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    taken = {dtype} | ({torch.float32} if dtype.itemsize == 2 else set())
    for other in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        if other in taken:
            check_residual("some", x, x.to(other))
        else:
            with pytest.raises(TypeError, match=f"some: residual is {other} and x {dtype}; allow"):
                check_residual("some", x, x.to(other))


def test_a_residual_of_another_shape_or_device_is_refused():
    x = torch.ones(2, 3)
    for residual, words in ((x[:1], r"\(1, 3\) on cpu"), (x.to("meta"), r"\(2, 3\) on meta")):
        with pytest.raises(ValueError, match=f"some: residual has shape {words} and x"):
            check_residual("some", x, residual)

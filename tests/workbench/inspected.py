"""Bare Triton kernels for `inspect`: typed and not, a matrix product, one that does not compile."""

import triton
import triton.language as tl

from nearlight.core.triton import jit


@triton.jit
def _copy_kernel(
    x_ptr: "*bf16",  # noqa: F722  # a type of Triton's, not of Python's
    y_ptr: "*bf16",  # noqa: F722  # the same
    n: tl.int32,
    BLOCK: tl.constexpr = 1024,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < n), offsets < n)


@jit
def _product_kernel(a_ptr, c_ptr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a = tl.load(a_ptr + rows * BLOCK + columns)
    tl.store(c_ptr + rows * BLOCK + columns, tl.dot(a, a, input_precision=PRECISION))


@triton.autotune([triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def _tuned_kernel(x_ptr: "*fp32", BLOCK: tl.constexpr):  # noqa: F722  # the same
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


@triton.jit
def _fp8_kernel(x_ptr: "*fp8e4nv", y_ptr: "*fp32"):  # noqa: F722  # the same
    offsets = tl.arange(0, 16)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(tl.float32))


@triton.jit
def _broken_kernel(x_ptr: "*fp32"):  # noqa: F722  # the same
    offsets = tl.arange(0, 15)
    tl.store(x_ptr + offsets, 0.0)

"""What an interpreted kernel sees and does, and that nothing is left over."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from nearlight.core.triton import jit

# --- masks, loops, arguments ---


@jit
def _masked_rows_kernel(x_ptr, y_ptr, rows, cols, step, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, cols, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = (offsets < cols) & (row < rows)
        x = tl.load(x_ptr + row * cols + offsets, mask=mask, other=-1.0)
        tl.store(y_ptr + row * cols + offsets, x + step, mask=mask)


def test_masks_of_block_and_scalar_in_a_loop_to_a_runtime_value():
    x, y = torch.randn(3, 50), torch.full((4, 50), 7.0)
    _masked_rows_kernel[(4,)](x, y, 3, 50, 0.5, BLOCK=16)
    assert torch.equal(y[:3], x + 0.5)
    assert torch.equal(y[3], torch.full((50,), 7.0))


def test_int32_and_loop_counters_wrap_and_int64_does_not():
    @jit
    def kernel(out_ptr, n):
        for i in range(2, 3):
            tl.store(out_ptr, (i * 1_500_000_000).to(tl.int64))
            tl.store(out_ptr + 1, i.to(tl.int64) * 1_500_000_000)
        tl.store(out_ptr + 2, (n * 1_500_000_000).to(tl.int64))

    out = torch.zeros(3, dtype=torch.int64)
    kernel[(1,)](out, 2)
    assert out.tolist() == [3_000_000_000 - 2**32, 3_000_000_000, 3_000_000_000 - 2**32]


@jit
def _arguments_kernel(
    out_ptr, one, n, big, wide: tl.int64, scale, flag, optional, pair, TYPE: tl.constexpr
):
    tl.store(out_ptr, one + n)
    tl.store(out_ptr + 1, (n * 2).to(TYPE))
    tl.store(out_ptr + 2, scale.to(tl.float64))  # fp32 on the way, as in a compiled kernel
    tl.store(out_ptr + 3, big.to(tl.float64))
    tl.store(out_ptr + 4, wide * 4_000_000_000)
    if flag:
        tl.store(out_ptr + 5, 1.0)
    if optional is None:
        tl.store(out_ptr + 6, pair[0] + pair[1])
    tl.store(out_ptr + 7, max(n, 5) + min(n, 5))


@pytest.mark.parametrize("flag", [True, False])
def test_arguments_have_the_types_a_compiled_kernel_sees(flag):
    out = torch.zeros(8, dtype=torch.float64)
    _arguments_kernel[(1,)](out, 1, 3, 2**31, 3, 0.1, flag, None, (4, 0.5), TYPE=tl.float32)
    scale = float(np.float32(0.1))
    assert out.tolist() == [4, 6, scale, 2.0**31, 12e9, float(flag), 4.5, 8]


def test_a_float_argument_widens_bf16_but_a_constant_does_not():
    @jit
    def kernel(x_ptr, out_ptr, scale, SCALE: tl.constexpr):
        x = tl.load(x_ptr)
        tl.store(out_ptr, (x * scale).dtype == tl.float32)
        tl.store(out_ptr + 1, (x * SCALE).dtype == tl.bfloat16)

    out = torch.zeros(2)
    kernel[(1,)](torch.ones(1, dtype=torch.bfloat16), out, 0.5, SCALE=0.5)
    assert out.tolist() == [1, 1]


def test_stride_one_is_a_constant_as_in_a_compiled_kernel():
    @jit
    def kernel(x_ptr, stride):
        tl.store(x_ptr + stride.to(tl.int64), 1.0)

    kernel[(1,)](torch.zeros(4), 2)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'to'"):
        kernel[(1,)](torch.zeros(4), 1)


def test_what_is_not_specialized_is_no_constant():
    @jit(do_not_specialize=["stride"])
    def kernel(x_ptr, stride, typed: tl.int64):
        tl.store(x_ptr + stride.to(tl.int64), typed.dtype == tl.int64)

    x = torch.zeros(4)
    kernel[(1,)](x, 1, 1)
    assert x.tolist() == [0, 1, 0, 0]


FACTOR = tl.constexpr(3)


def test_module_constants_compute_with_tensors_from_both_sides():
    @jit
    def kernel(x_ptr, n):
        x = tl.load(x_ptr + tl.arange(0, 2))
        tl.store(x_ptr + tl.arange(0, 2), FACTOR * x + x * FACTOR - (FACTOR - n))
        tl.store(x_ptr + 2, FACTOR > n)
        tl.store(x_ptr + 3, FACTOR // n + FACTOR * FACTOR)

    x = torch.ones(4)
    kernel[(1,)](x, 2)
    assert x.tolist() == [5, 5, 1, 10]


@triton.jit
def _plain_helper(x, power: tl.constexpr):
    result = x
    for _ in tl.static_range(power - 1):
        result *= x
    return result


@jit
def _own_helper(x):
    return _plain_helper(x, 3) + 1


@jit
def _nested_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(x_ptr + tl.arange(0, N), _own_helper(x))


def test_helpers_of_both_kinds_nest():
    x = torch.arange(8.0)
    _nested_kernel[(1,)](x, N=8)
    assert torch.equal(x, torch.arange(8.0) ** 3 + 1)


def test_captured_variables_and_grid_functions():
    factor = tl.constexpr(3)

    @triton.jit
    def local_helper(x):
        return x * factor

    @jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < n)
        tl.store(x_ptr + offsets, local_helper(x), mask=offsets < n)

    x = torch.arange(10.0)
    kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, 10, BLOCK=4)
    assert torch.equal(x, torch.arange(10.0) * 3)


@jit
def _shapes_kernel(x_ptr, out_ptr, N: tl.constexpr):
    rows, cols = tl.arange(0, 8), tl.arange(0, N)
    square = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + square)
    tl.store(out_ptr + square, tl.trans(tl.trans(x)))
    tl.store(out_ptr + 8 * N + square, tl.reshape(tl.reshape(x, (N, 8)), (8, N)))
    tl.store(out_ptr + 16 * N + square, tl.softmax(x, 1, keep_dims=True))
    tl.store(out_ptr + 24 * N + square, tl.sort(x, dim=1))
    even, odd = tl.split(tl.reshape(x, (8, N // 2, 2)))
    tl.store(out_ptr + 32 * N + square, tl.reshape(tl.join(odd, even), (8, N)))
    tl.store(out_ptr + 40 * N + square, tl.flip(x, 1))
    tl.store(out_ptr + 48 * N + square, tl.expand_dims(rows, 1) + tl.zeros((8, N), tl.float32))
    count = 0
    while count < 3:
        count += 1
    tl.store(out_ptr + 56 * N + square, tl.full((8, N), count, tl.float32))


def test_shapes_softmax_sort_and_while():
    x, out = torch.randn(8, 16), torch.empty(8, 8, 16)
    _shapes_kernel[(1,)](x, out, N=16)
    rows = torch.arange(8.0)[:, None].expand(8, 16)
    swapped = x.reshape(8, 8, 2).flip(2).reshape(8, 16)
    exact = [x, x, out[2], x.sort(1).values, swapped, x.flip(1), rows, torch.full((8, 16), 3.0)]
    assert torch.equal(out, torch.stack(exact))
    torch.testing.assert_close(out[2], x.softmax(1))


@jit
def _random_kernel(out_ptr, seed, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.rand(seed, tl.arange(0, N)))


def test_random_numbers_are_uniform_and_repeat():
    first, again, other = torch.empty(4096), torch.empty(4096), torch.empty(4096)
    for out, seed in ((first, 7), (again, 7), (other, 8)):
        _random_kernel[(1,)](out, seed, N=4096)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0 <= first.min() and first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02 and abs(first.std() - 12**-0.5) < 0.01


@jit
def _descriptor_kernel(x_ptr, out_ptr, rows, cols, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, [rows, cols], [cols, 1], [M, N])
    target = tl.make_tensor_descriptor(out_ptr, [rows, cols], [cols, 1], [M, N])
    row = tl.program_id(0) * M
    target.store([row, 0], source.load([row, 0]) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_descriptors(dtype):
    x, out = torch.randn(7, 16).to(dtype), torch.zeros(7, 16, dtype=dtype)
    _descriptor_kernel[(2,)](x, out, 7, 16, M=4, N=16)
    assert torch.equal(out, x * 2)


# --- launches ---


def test_empty_grid_launches_nothing_and_a_grid_too_large_for_a_gpu_raises():
    x = torch.zeros(4)
    _nested_kernel[(0,)](x, N=4)
    _nested_kernel[(3, 0)](x, N=4)
    assert torch.equal(x, torch.zeros(4))
    with pytest.raises(ValueError, match="axis 1 of a launch takes 0 to 65535"):
        _nested_kernel[(1, 65_536)](x, N=4)


def test_logic_of_blocks_is_element_by_element_as_in_a_compiled_kernel():
    @jit
    def kernel(x_ptr, n, TWICE: tl.constexpr):
        offsets = tl.arange(0, 8)
        inside = (offsets < n) and (offsets > 0)
        tl.store(x_ptr + offsets, 1.0, mask=inside or not (offsets < 6))
        if TWICE and n > 1 and not n == 0:
            tl.store(x_ptr, 2.0)

    x = torch.zeros(8)
    kernel[(1,)](x, 3, TWICE=True)
    assert x.tolist() == [2, 1, 1, 0, 0, 0, 1, 1]
    x = torch.zeros(8)
    kernel[(1,)](x, 3, TWICE=False)
    assert x.tolist() == [0, 1, 1, 0, 0, 0, 1, 1]


def test_what_a_gpu_does_not_compile_raises():
    @jit
    def block_condition(x_ptr, n):
        if tl.arange(0, 4) < n:
            tl.store(x_ptr, 1.0)

    @jit
    def chain(x_ptr, n):
        if 0 < n < 9:
            tl.store(x_ptr, 1.0)

    with pytest.raises(ValueError, match=r"block of shape \[4\] is no condition"):
        block_condition[(1,)](torch.zeros(4), 3)
    with pytest.raises(ValueError, match="`0 < n < 9`: Triton before 3.9"):
        chain[(1,)](torch.zeros(4), 3)


def test_tensors_of_two_devices_and_foreign_arguments_raise():
    with pytest.raises(ValueError, match="`y_ptr` is on meta"):
        _masked_rows_kernel[(1,)](torch.zeros(4), torch.zeros(4, device="meta"), 1, 4, 2, BLOCK=4)
    with pytest.raises(TypeError, match="argument `step` is a str"):
        _masked_rows_kernel[(1,)](torch.zeros(4), torch.zeros(4), 1, 4, "2", BLOCK=4)


def snapshot():
    owners = [tl, tl.core, tl.math, tl.tensor, tl.block_type, tl.dtype, tl.constexpr]
    owners += [JITFunction, libdevice, cuda_libdevice, stock, stock.InterpretedFunction]
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]


def test_nothing_stays_patched_not_even_after_an_exception():
    @jit
    def fails(x_ptr):
        tl.store(x_ptr, 1.0)
        tl.static_assert(False, "on purpose")

    module = sys.modules[__name__]
    x = torch.zeros(8)
    _nested_kernel[(1,)](x, N=8)
    before, names = snapshot(), set(vars(module))
    _nested_kernel[(1,)](x, N=8)
    assert snapshot() == before
    with pytest.raises(AssertionError, match="on purpose") as error:
        fails[(2,)](x)
    assert "while interpreting fails, program (0, 0, 0)" in error.value.__notes__
    assert snapshot() == before
    assert set(vars(module)) == names
    assert not {"math", "ast", "TensorHandle", "interpreter_semantic"} & names


def test_the_variable_of_tritons_own_interpreter_does_no_harm(tmp_path):
    """With TRITON_INTERPRET set, tl.sum and helpers are of another class, and compiling refuses."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch, triton, triton.language as tl
from nearlight.core.op import KernelBuild
from nearlight.core.triton import compile_for, jit

@triton.jit
def double(x):
    return x * 2

@jit
def kernel(x_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(x_ptr, double(tl.sum(x)) + tl.max(x) + tl.sum(tl.cumsum(x)))

x = torch.tensor([1.0, 2, 3, 4])
kernel[(1,)](x)
print(x[0].item())
try:
    compile_for(KernelBuild(kernel, {"x_ptr": "*fp32"}, {}), "sm_80")
except RuntimeError as error:
    print(error)
"""
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("44.0\nTRITON_INTERPRET is set")


def test_a_missing_import_is_not_hidden():
    @jit
    def kernel(x_ptr):
        tl.store(x_ptr, textwrap.nothing)  # noqa: F821  # Triton's rewriting would provide it

    with pytest.raises(NameError, match="textwrap"):
        kernel[(1,)](torch.zeros(1))


def test_threads_take_turns():
    results = {}

    def work(seed):
        x = torch.arange(8.0) + seed
        for _ in range(3):
            y = x.clone()
            _nested_kernel[(1,)](y, N=8)
        results[seed] = torch.equal(y, x**3 + 1)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)

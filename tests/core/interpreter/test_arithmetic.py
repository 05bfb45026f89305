"""Formats, functions, reductions and products of the interpreter, against torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import exp as imported_exp
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice

from nearlight.core.triton import jit

N = 4096
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(dtype, n=N, seed=0):
    """Random bit patterns: normal, subnormal, infinite and NaN alike, and both zeros."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    values = torch.from_numpy(raw).view(dtype).clone()
    special = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, -3.4e38]
    values[: len(special)] = torch.tensor(special, dtype=torch.float64).to(dtype)
    return values


def mismatches(actual, expected):
    """Count elements whose bits differ; every NaN equals every NaN."""
    assert actual.dtype == expected.dtype
    integer = _BITS[actual.dtype.itemsize]
    same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
    if actual.dtype.is_floating_point:
        same |= actual.float().isnan() & expected.float().isnan()
    return int((~same).sum())


# --- casts ---


@jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr, ROUNDING: tl.constexpr = None):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x.to(y_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def cast(x, dtype, rounding=None):
    y = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(1,)](x, y, N=x.numel(), ROUNDING=rounding)
    return y


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_round_to_nearest_even_for_random_bits(source, target):
    x = bits_of(source, 65_536)
    expected = x.to(target)
    if source == torch.float64 and target == torch.bfloat16:
        x = x.float().double()  # torch rounds twice, through fp32; see the next test
        expected = x.float().to(target)
    if source == torch.float64 and target == torch.float16:
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(x.numpy().astype(np.float16))
    assert mismatches(cast(x, target), expected) == 0


def test_fp64_to_bf16_rounds_once():
    tie = 1 + 2.0**-8  # halfway between 1 and the next bf16
    x = torch.tensor([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40], dtype=torch.float64)
    assert cast(x, torch.bfloat16).tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]


@pytest.mark.parametrize("integer", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("floating", FLOATS)
def test_casts_between_integers_and_floats(integer, floating):
    x = torch.randint(-100, 100, (64,)).to(integer)
    assert mismatches(cast(x, floating), x.to(floating)) == 0
    y = (torch.arange(64) / 4).to(floating)
    assert mismatches(cast(y, integer), y.to(integer)) == 0


def test_large_integers_round_to_the_nearest_bf16():
    x = torch.tensor([257, 258, 259, 2**24 + 2**16 + 1, -(2**31) + 1, 2**31 - 1, 0, 1])
    # 257 lies halfway and goes to even; 2**24 + 2**16 + 1 lies just above a tie
    expected = [256.0, 258.0, 260.0, 2.0**24 + 2**17, -(2.0**31), 2.0**31, 0.0, 1.0]
    assert cast(x.int(), torch.bfloat16).tolist() == expected


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("other", FLOATS)
def test_fp8_casts(fp8, other):
    every = torch.arange(256, dtype=torch.uint8).view(fp8)
    assert mismatches(cast(every, other), every.to(other)) == 0
    x = bits_of(other, 65_536)
    x[:16_384] = (torch.randn(16_384) * 20).to(other)
    largest = torch.finfo(fp8).max
    expected = x.double().clamp(-largest, largest)  # NVIDIA's conversion saturates
    # the nearest value, found by comparing with all of them
    table = every.double()[every.double().isfinite()]
    near = (expected[:, None][:2048] - table).abs()
    got = cast(x, fp8).double()
    assert (got.isnan() == x.isnan()).all()
    error = (got[:2048] - expected[:2048]).abs()
    ok = (error == near.min(1).values) | expected[:2048].isnan()
    assert ok.all()
    assert mismatches(cast(x, fp8), expected.float().to(fp8)) <= (other == torch.float64) * 4


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_rounding_towards_zero(source, target):
    x = bits_of(source)
    x = torch.where(x.isnan(), 0.0, x)
    got = cast(x, target, "rtz").double()
    assert (got.abs() <= x.double().abs()).all()
    up = torch.nextafter(got.to(target), got.sign().to(target) * float("inf")).double()
    is_inside = x.double().abs() < torch.finfo(target).max
    assert (up.abs() > x.double().abs())[is_inside & (got != 0)].all()


def test_formats_that_do_not_run_say_so():
    @jit
    def kernel(x_ptr):
        x = tl.load(x_ptr + tl.arange(0, 4))
        tl.store(x_ptr + tl.arange(0, 4), x.to(tl.float8e4b15).to(tl.float32))

    with pytest.raises(NotImplementedError, match="fp8e4b15 does not run interpreted"):
        kernel[(1,)](torch.zeros(4))


# --- arithmetic ---


@jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(out_ptr + 0 * N + offsets, x + y)
    tl.store(out_ptr + 1 * N + offsets, x - y)
    tl.store(out_ptr + 2 * N + offsets, x * y)
    tl.store(out_ptr + 3 * N + offsets, (x / y).to(x.dtype))
    tl.store(out_ptr + 4 * N + offsets, tl.minimum(x, y))
    tl.store(out_ptr + 5 * N + offsets, tl.maximum(x, y))
    tl.store(out_ptr + 6 * N + offsets, tl.where(x < y, x, y))
    tl.store(out_ptr + 7 * N + offsets, tl.abs(x))
    tl.store(out_ptr + 8 * N + offsets, (x >= y).to(x.dtype))
    tl.store(out_ptr + 9 * N + offsets, (x != x).to(x.dtype))
    tl.store(out_ptr + 10 * N + offsets, x * 0.5 + 1)
    tl.store(out_ptr + 11 * N + offsets, tl.clamp(x, -1.0, 1.0).to(x.dtype))


def number_of(choose, x, y):
    """A NaN loses, as on a GPU (torch.fmin returns NaN for a signalling one)."""
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, choose(x, y)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_equals_torch_bit_by_bit(dtype):
    x, y = bits_of(dtype, seed=1), bits_of(dtype, seed=2)
    x[:1024], y[:1024] = torch.randn(1024).to(dtype), torch.randn(1024).to(dtype)
    out = torch.empty(12, N, dtype=dtype)
    _arithmetic_kernel[(1,)](x, y, out, N=N)
    expected = [
        x + y,
        x - y,
        x * y,
        (x / y) if dtype == torch.float64 else (x.float() / y.float()).to(dtype),
        number_of(torch.minimum, x, y),
        number_of(torch.maximum, x, y),
        torch.where(x < y, x, y),
        x.abs(),
        (x >= y).to(dtype),
        x.isnan().to(dtype),
        x * 0.5 + 1,
        torch.where(x.isnan(), -1.0, x.clamp(-1, 1)).to(dtype),
    ]
    zero = torch.zeros((), dtype=dtype)
    for row, (got, want) in enumerate(zip(out, expected, strict=True)):
        # which zero min and max return is not defined
        got, want = (torch.where(t == 0, zero, t) for t in (got, want))
        assert mismatches(got, want) == 0, row


@jit
def _functions_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + 0 * N + offsets, tl.exp(x))
    tl.store(out_ptr + 1 * N + offsets, tl.log(x))
    tl.store(out_ptr + 2 * N + offsets, tl.rsqrt(x))
    tl.store(out_ptr + 3 * N + offsets, tl.erf(x))
    tl.store(out_ptr + 4 * N + offsets, tl.sigmoid(x))
    tl.store(out_ptr + 5 * N + offsets, libdevice.tanh(x))
    tl.store(out_ptr + 6 * N + offsets, cuda_libdevice.log1p(x))
    tl.store(out_ptr + 7 * N + offsets, libdevice.rsqrt(x))
    tl.store(out_ptr + 8 * N + offsets, imported_exp(x))
    tl.store(out_ptr + 9 * N + offsets, tl.fma(x, x, -x))
    tl.store(out_ptr + 10 * N + offsets, tl.sqrt(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_and_libdevice(dtype):
    x = torch.linspace(0.01, 4, 256, dtype=torch.float64).to(dtype)
    out = torch.empty(11, 256, dtype=dtype)
    _functions_kernel[(1,)](x, out, N=256)
    d = x.double()
    truth = [d.exp(), d.log(), d.rsqrt(), d.erf(), d.sigmoid(), d.tanh(), d.log1p(), d.rsqrt()]
    truth = torch.stack([*truth, d.exp(), d * d - d, d.sqrt()])
    torch.testing.assert_close(out.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=1e-15)


def test_unknown_libdevice_function_and_assembly_say_what_to_do():
    @jit
    def bessel(x_ptr):
        tl.store(x_ptr, libdevice.j0(tl.load(x_ptr)))

    @jit
    def assembly(x_ptr):
        x = tl.load(x_ptr + tl.arange(0, 2))
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
        tl.store(x_ptr + tl.arange(0, 2), y)

    with pytest.raises(NotImplementedError, match="__nv_j0f does not run interpreted; these do"):
        bessel[(1,)](torch.ones(2))
    with pytest.raises(NotImplementedError, match="guard it with a constexpr"):
        assembly[(1,)](torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_atomic_add_with_colliding_addresses(dtype):
    @jit
    def kernel(x_ptr, out_ptr):
        offsets = tl.arange(0, 8)
        tl.atomic_add(out_ptr + offsets % 2, tl.load(x_ptr + offsets), mask=offsets < 6)

    x, out = torch.arange(8).to(dtype), torch.ones(2, dtype=dtype)
    kernel[(1,)](x, out)
    assert out.tolist() == [1 + 0 + 2 + 4, 1 + 1 + 3 + 5]


# --- reductions, scans, products ---


@jit
def _reduce_kernel(x_ptr, sum_ptr, max_ptr, min_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(sum_ptr + tl.arange(0, M), tl.sum(x, axis=1).to(x.dtype))
    tl.store(max_ptr + tl.arange(0, N), tl.max(x, axis=0).to(x.dtype))
    tl.store(min_ptr, x.min().to(x.dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.int8])
def test_sum_max_min(dtype):
    x = (torch.randn(8, 64) * 3).to(dtype)
    total, high, low = (torch.empty(n, dtype=dtype) for n in (8, 64, 1))
    _reduce_kernel[(1,)](x, total, high, low, M=8, N=64)
    assert mismatches(high, x.amax(0)) == 0
    assert mismatches(low, x.min().reshape(1)) == 0
    if dtype.is_floating_point:
        # log2(64) roundings of partial sums no larger than the sum of magnitudes
        bound = 6 * torch.finfo(dtype).eps * x.double().abs().sum(1)
        assert ((total.double() - x.double().sum(1)).abs() <= bound).all()
        assert (total.double() - x.double().sum(1)).abs().max() > 0 or dtype == torch.float64
    else:
        assert total.tolist() == x.sum(1).to(dtype).tolist()


def test_max_ignores_nan_and_argmax_breaks_ties_to_the_left():
    @jit
    def kernel(x_ptr, out_ptr, index_ptr):
        x = tl.load(x_ptr + tl.arange(0, 8))
        value, index = tl.max(x, axis=0, return_indices=True)
        tl.store(out_ptr, tl.max(x, axis=0))
        tl.store(out_ptr + 1, value)
        tl.store(index_ptr, index)
        tl.store(index_ptr + 1, tl.argmin(x, axis=0))

    out, index = torch.empty(2), torch.empty(2, dtype=torch.int32)
    kernel[(1,)](torch.tensor([1.0, -7, 5, 5, 0, -7, 5, 2]), out, index)
    assert out.tolist() == [5, 5] and index.tolist() == [2, 1]
    kernel[(1,)](torch.tensor([float("nan"), -7, 5, 5, 0, -7, 5, 2]), out, index)
    assert out[0] == 5


@jit
def _online_combine(max_a, sum_a, max_b, sum_b):
    top = tl.maximum(max_a, max_b)
    return top, sum_a * tl.exp(max_a - top) + sum_b * tl.exp(max_b - top)


@triton.jit
def _last_combine(a, b):
    return a * 0 + b


@triton.jit
def _first_combine(a, b):
    return a + b * 0


def test_reduce_and_scan_with_own_combine_functions():
    @jit
    def kernel(x_ptr, lse_ptr, last_ptr, total_ptr, back_ptr, N: tl.constexpr):
        offsets = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
        x = tl.load(x_ptr + offsets)
        top, total = tl.reduce((x, tl.full((4, N), 1.0, tl.float32)), 1, _online_combine)
        tl.store(lse_ptr + tl.arange(0, 4), top + tl.log(total))
        tl.store(last_ptr + tl.arange(0, 4), tl.reduce(x, 1, _last_combine))
        tl.store(total_ptr + offsets, tl.cumsum(x, axis=1))
        tl.store(back_ptr + offsets, tl.associative_scan(x, 0, _first_combine, reverse=True))

    x = torch.randn(4, 32)
    lse, last, total, back = torch.empty(4), torch.empty(4), torch.empty(4, 32), torch.empty(4, 32)
    kernel[(1,)](x, lse, last, total, back, N=32)
    torch.testing.assert_close(lse, x.logsumexp(1))
    assert torch.equal(last, x[:, -1])
    torch.testing.assert_close(total, x.cumsum(1))
    assert torch.equal(back, x[-1:].expand(4, 32))


@jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    square = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + square), tl.load(b_ptr + square)
    c = tl.load(c_ptr + square)
    tl.store(out_ptr + square, tl.dot(a, b, c, input_precision=PRECISION, out_dtype=c.dtype))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64],
)
def test_dot_accumulates_in_full_precision(dtype):
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    c = torch.randn(32, 32, dtype=wide)
    out = torch.empty_like(c)
    _dot_kernel[(1,)](a, b, c, out, N=32, PRECISION=None)
    truth = a.double() @ b.double() + c.double()
    assert (out - truth).abs().max() <= 64 * torch.finfo(wide).eps * truth.abs().max()


def test_dot_of_int8_and_of_fp32_in_tf32_and_ieee():
    a = torch.randint(-128, 128, (32, 32), dtype=torch.int8)
    out = torch.empty(32, 32, dtype=torch.int32)
    _dot_kernel[(1,)](a, a, torch.ones_like(out), out, N=32, PRECISION=None)
    assert torch.equal(out, a.int() @ a.int() + 1)
    x, y = torch.randn(32, 32), torch.randn(32, 32)
    truth, zero = x.double() @ y.double(), torch.zeros(32, 32)
    results = {precision: torch.empty(32, 32) for precision in (None, "tf32", "ieee")}
    for precision, result in results.items():
        _dot_kernel[(1,)](x, y, zero, result, N=32, PRECISION=precision)
    errors = {p: float((r - truth).abs().max()) for p, r in results.items()}
    assert errors[None] == errors["tf32"] > 1e-4 > 1e-5 > errors["ieee"]


@jit
def _undefined_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < 3))


def test_what_is_masked_off_without_another_value_is_undefined():
    """Zeros, which Triton's interpreter takes, would let a sum over the lanes look right."""
    for dtype in FLOATS:
        y = torch.zeros(4, dtype=dtype)
        _undefined_kernel[(1,)](torch.ones(4, dtype=dtype), y, BLOCK=4)
        assert y[:3].tolist() == [1, 1, 1] and y[3].isnan()
    y = torch.zeros(4, dtype=torch.int32)
    _undefined_kernel[(1,)](torch.ones(4, dtype=torch.int32), y, BLOCK=4)
    assert y.tolist() == [1, 1, 1, -1]


@jit
def _one_masked_off_kernel(x_ptr, y_ptr, n, OTHER: tl.constexpr):
    at = tl.arange(0, 1)
    tl.store(y_ptr, tl.load(x_ptr, n > 5, other=OTHER))
    tl.store(y_ptr + 1 + at, tl.load(x_ptr + at, at > n, other=OTHER))
    tl.store(y_ptr + 2 + at, tl.load(x_ptr + at, at > n))


@pytest.mark.parametrize("other", [0.0, 2.0])
def test_of_a_single_element_masked_off_another_value_is_taken_also_if_it_is_zero(other):
    y = torch.ones(3)
    _one_masked_off_kernel[(1,)](torch.ones(4), y, 3, OTHER=other)
    assert y[:2].tolist() == [other, other] and y[2].isnan()

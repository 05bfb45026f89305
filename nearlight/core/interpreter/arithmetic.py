"""Arithmetic of an interpreted kernel: Triton's builder on numpy, right for every float format.

Triton keeps bf16 and fp8 as raw bits in its interpreter and computes with the bits: casts truncate,
sums add bit patterns, dots multiply them. Here every such operand is decoded to fp32, computed on,
and rounded once to nearest even, as the hardware does; comparisons are booleans; min and max
ignore NaN as on a GPU; a matrix product of fp32 operands sees TF32 unless the kernel asks for
`input_precision="ieee"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray[Any, Any]

# What holds a Triton scalar in numpy: bits for the formats numpy does not have.
_NUMPY = {
    "int1": np.dtype(np.bool_),
    **{f"{sign}int{n}": np.dtype(f"{sign}int{n}") for sign in ("", "u") for n in (8, 16, 32, 64)},
    **{f"fp{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "bf16": np.dtype(np.uint16),
    **{f"fp8{kind}": np.dtype(np.uint8) for kind in ("e4nv", "e5", "e4b8", "e5b16", "e4b15")},
}
_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_POINTER = np.dtype(np.uint64)
# NaN in every floating dtype, −1 in every whole one.
UNDEFINED_BYTE = 0xFF


def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the numpy dtype that holds a Triton scalar: bits for bf16 and fp8, addresses."""
    scalar = dtype.scalar
    return _POINTER if scalar.is_ptr() else _NUMPY[scalar.name]


def decode(handle: TensorHandle) -> Array:
    """Return the numbers a handle holds: bf16 and fp8 as fp32, everything else as it is."""
    name = handle.dtype.scalar.name
    if name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    if name in _FP8:
        return _fp8_values(name)[handle.data]
    return handle.data


def encode(values: Any, dtype: tl.dtype) -> TensorHandle:
    """Return the handle of `values` in `dtype`, rounded to nearest even and only once."""
    values, dtype = np.asarray(values), dtype.scalar
    if dtype.name == "bf16":
        return TensorHandle(_to_bf16_bits(_to_fp32(values)), dtype)
    if dtype.name in _FP8:
        return TensorHandle(_to_fp8_bits(_to_fp32(values), dtype.name), dtype)
    if dtype.name.startswith("fp8"):
        raise NotImplementedError(
            f"{dtype.name} does not run interpreted; allowed are {', '.join(_FP8)}"
        )
    return TensorHandle(values.astype(numpy_dtype(dtype), copy=False), dtype)


@cache
def _fp8_values(name: str) -> Array:
    values: Array = torch.arange(256, dtype=torch.uint8).view(_FP8[name]).float().numpy()
    return values


def _to_fp32(values: Array) -> Array:
    """Return fp32 values that round to a narrower format as the given ones would.

    What fp32 cannot hold is rounded to odd (the last bit says that something was cut off), so
    that the rounding to the narrower format is the only one that counts.
    """
    if values.dtype == np.float32:
        return values
    if values.dtype == np.float16:
        return values.astype(np.float32)
    exact = values.astype(np.float64)
    nearest = exact.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    is_even_and_inexact = (back != exact) & ((bits & 1) == 0) & ~np.isnan(exact)
    step = np.where(np.abs(back) < np.abs(exact), 1, -1).astype(np.uint32)
    return np.where(is_even_and_inexact, bits + step, bits).view(np.float32)


def _to_bf16_bits(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    is_nan = np.isnan(values)
    return np.where(is_nan, np.uint16(0x7FFF), rounded) if is_nan.any() else rounded


def _to_fp8_bits(values: Array, name: str) -> Array:
    # NVIDIA's cvt is satfinite: what is too large becomes the largest number; NaN stays.
    largest = np.float32(torch.finfo(_FP8[name]).max)
    clipped = torch.from_numpy(np.clip(values, -largest, largest).reshape(-1))
    bits: Array = clipped.to(_FP8[name]).view(torch.uint8).numpy()
    return bits.reshape(values.shape)


def _towards_zero(source: Array, rounded: TensorHandle) -> TensorHandle:
    """Turn a value rounded to nearest into one rounded towards zero: one step in its bits."""
    too_large = np.abs(decode(rounded).astype(np.float64)) > np.abs(source.astype(np.float64))
    bits = rounded.data.view(f"u{rounded.data.itemsize}")
    return TensorHandle(
        (bits - too_large).astype(bits.dtype).view(rounded.data.dtype), rounded.dtype
    )


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    """Make a function of arrays from one of torch, for what numpy lacks."""
    return lambda x: function(torch.from_numpy(np.array(x))).numpy()


# libdevice functions by their symbol without `__nv_`, `fast_` and the letter of the type.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in (
            "exp exp2 expm1 log log2 log10 log1p sqrt cbrt sin cos tan sinh cosh tanh "
            "floor ceil trunc rint hypot fmod copysign fmax fmin isnan isinf"
        ).split()
    },
    **{f"a{name}": getattr(np, f"arc{name}") for name in "sin cos tan sinh cosh tanh".split()},
    "atan2": np.arctan2,
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "pow": np.power,
    "powi": np.power,
    "fabs": np.abs,
    "nearbyint": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "finite": np.isfinite,
    "erf": _torch(torch.erf),
    "erfc": _torch(torch.erfc),
    "erfinv": _torch(torch.erfinv),
    "lgamma": _torch(torch.lgamma),
}


def _libdevice(symbol: str) -> Callable[..., Any]:
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    function = LIBDEVICE.get(name) or LIBDEVICE.get(name[:-1] if name[-1] in "fd" else name)
    if function is None:
        raise NotImplementedError(
            f"libdevice's {symbol} does not run interpreted; these do: "
            f"{', '.join(sorted(LIBDEVICE))}. Write it with tl.* functions, or run on a GPU."
        )
    return function


class Builder(InterpreterBuilder):
    """Triton's interpreter builder with its arithmetic replaced where it was wrong."""

    # Told the addresses of each load that are read, before they are.
    on_load: Callable[[Array], None] | None = None
    # Whether the load under way has an `other`, which is 0 where it does not arrive.
    has_other = False

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any
    ) -> TensorHandle:
        """Load; what is masked off without an `other` is undefined on a GPU and NaN or −1 here."""
        if self.on_load is not None:
            self.on_load(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        if other is None:
            dtype = numpy_dtype(ptrs.get_element_ty())
            byte = 0 if self.has_other else UNDEFINED_BYTE
            filled = np.full(ptrs.data.size * dtype.itemsize, byte, np.uint8)
            other = TensorHandle(filled.view(dtype).reshape(ptrs.data.shape), ptrs.dtype)
        return super().create_masked_load(ptrs, mask, other, *hints, **named)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> TensorHandle:
        """Compute on numbers and round once; a comparison gives int1."""
        a, b = decode(lhs), decode(rhs)
        if a.dtype == np.bool_ and op in (np.add, np.subtract):
            op = np.bitwise_xor  # int1 wraps as any integer does
        output = op(a, b)
        return encode(output, tl.int1 if output.dtype == np.bool_ else lhs.dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> TensorHandle:
        """Compute on numbers and round once."""
        return encode(op(decode(arg)), arg.dtype)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., Any]) -> TensorHandle:
        """Compute on numbers and round once."""
        return encode(op(decode(lhs), decode(rhs), decode(other)), other.dtype)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> TensorHandle:
        """Choose bits; nothing is rounded."""
        return TensorHandle(np.where(cond.data, lhs.data, rhs.data), lhs.dtype.scalar)

    def create_minnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        """Return the smaller number; a NaN loses."""
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> TensorHandle:
        """Return the larger number; a NaN loses."""
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> TensorHandle:
        """Clamp; a NaN becomes `lo` unless it is to be propagated."""
        if propagate_nans == ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(arg, lo), hi)
        return self.ternary_op(arg, lo, hi, np.clip)

    def create_fma(self, x: Any, y: Any, z: Any) -> TensorHandle:
        """Multiply and add in fp64, where a product of two fp32 numbers is exact."""
        product = decode(x).astype(np.float64) * decode(y)
        return encode(product + decode(z), z.dtype)

    def create_rsqrt(self, arg: Any) -> TensorHandle:
        """Return one over the square root."""
        return self.unary_op(arg, LIBDEVICE["rsqrt"])

    def create_erf(self, arg: Any) -> TensorHandle:
        """Return the error function, by torch: numpy has none."""
        return self.unary_op(arg, LIBDEVICE["erf"])

    def cast_impl(self, src: Any, dst_type: tl.dtype) -> TensorHandle:
        """Cast between any two numeric types."""
        return encode(decode(src), dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        """Cast between floats, to nearest even or, where the kernel asks for it, towards zero."""
        values = decode(src)
        rounded = encode(values, dst_type)
        is_rtz = rounding_mode == ir.ROUNDING_MODE.RTZ
        return _towards_zero(values, rounded) if is_rtz else rounded

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, _: Any) -> TensorHandle:
        """Multiply matrices, accumulating in fp32 (fp64, int32) as tensor cores do."""
        x, y, accumulator = decode(a), decode(b), decode(d)
        if x.dtype.kind in "iu":
            # exact in fp64, and BLAS knows no integers
            product = np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64)
            return encode(product + accumulator, d.dtype)
        if a.dtype.scalar.is_fp32() and input_precision == ir.INPUT_PRECISION.TF32:
            x, y = _to_tf32(x), _to_tf32(y)
        compute = np.float64 if accumulator.dtype == np.float64 else np.float32
        product = np.matmul(x.astype(compute, copy=False), y.astype(compute, copy=False))
        return encode(product + accumulator.astype(compute, copy=False), d.dtype)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *scope: Any) -> Any:
        """Add bf16 one element at a time (its bits are no integers); else as Triton does."""
        if val.dtype.scalar.name != "bf16":
            return super().create_atomic_rmw(op, ptr, val, mask, *scope)
        before = np.zeros(val.data.shape, np.uint16)
        for index in zip(*np.nonzero(mask.data), strict=True):
            address, one = ptr.data[index].reshape(1), np.ones(1, np.bool_)
            old = native.load(address, one, np.zeros(1, np.uint16), np.dtype(np.uint16))
            new = self.create_fadd(
                TensorHandle(old, tl.bfloat16),
                TensorHandle(val.data[index].reshape(1), tl.bfloat16),
            )
            native.store(address, new.data, one)
            before[index] = old[0]
        return TensorHandle(before, val.dtype.scalar)

    def get_bf16(self, value: float) -> TensorHandle:
        """Return a bf16 constant."""
        return encode(np.array([value], np.float64), tl.bfloat16)

    def get_all_ones_value(self, type: tl.dtype) -> TensorHandle:
        """Return the integer whose bits are all set."""
        return TensorHandle(~np.zeros(1, numpy_dtype(type)), type.scalar)

    def create_extern_elementwise(
        self, lib: str, path: str, symbol: str, args: Sequence[Any], type: tl.dtype, pure: bool
    ) -> TensorHandle:
        """Run a libdevice function on numpy, or say that it does not run here."""
        return encode(_libdevice(symbol)(*(decode(arg) for arg in args)), type)

    def create_inline_asm(self, *args: Any) -> TensorHandle:
        """Refuse: PTX does not run on a CPU."""
        raise NotImplementedError(
            "inline_asm_elementwise does not run interpreted; guard it with a constexpr and give "
            "the same result by tl.* functions in the other branch"
        )


def _to_tf32(values: Array) -> Array:
    # Tensor cores ignore the 13 bits that TF32 lacks.
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

"""Dropout and dropout with a residual: the draws, their exact reference, kernels and torch ops.

    out = x · keep / (1 − p)  [+ residual]          dx = dout · keep / (1 − p)

Element e keeps its value where word e mod 4 of Philox 4x32-10 at the counter (e div 4, offset),
under the key seed, is at least p · 2³². Here e is the element's number in logical order, so that
the mask knows nothing of strides, tiles and grids. No mask is stored: the backward draws it again.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.launch import launch_gpu
from nearlight.core.pointwise import Rule, merge_dims, tile
from nearlight.core.register import register_op
from nearlight.core.rows import (
    FLOATS,
    accumulator,
    accumulator_pipe,
    refuse_dtensor,
    triton_accumulator,
)
from nearlight.core.triton import jit

_WORD = 2**32
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def draw_seed(x: torch.Tensor) -> torch.Tensor:
    """Draw a seed and an offset, int64 (2,), from the default generator of x's device."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return the least word that keeps an element, and the factor of what is kept."""
    return min(round(p * _WORD), _WORD - 1), 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def philox(seed: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Compute Philox 4x32-10 in plain PyTorch.

    Args:
        seed: (2,) int64, the key and the upper half of the counter.
        counters: (N,) int64, the lower half of the counter.

    Returns:
        (N, 4) int64, words in [0, 2³²).

    Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """

    def halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A product of two words wraps into int64 with the right bits.
        return value & (_WORD - 1), (value >> 32) & (_WORD - 1)

    (c0, c1), (c2, c3) = halves(counters), halves(seed[1])
    k0, k1 = halves(seed[0])
    for _ in range(10):
        (low0, high0), (low2, high2) = halves(c0 * 0xD2511F53), halves(c2 * 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & (_WORD - 1), (k1 + 0xBB67AE85) & (_WORD - 1)
    return torch.stack([c0, c1, c2, c3], dim=-1)


def plain_dropout(x: torch.Tensor, p: float, seed: torch.Tensor | None) -> torch.Tensor:
    """Compute dropout in plain PyTorch, with the mask that the kernels draw."""
    seed = draw_seed(x) if seed is None else seed
    threshold, scale = threshold_and_scale(p)
    counters = torch.arange((x.numel() + 3) // 4, device=x.device)
    keep = philox(seed, counters).view(-1)[: x.numel()].view(x.shape) >= threshold
    acc = accumulator(x.dtype)
    return (x.to(acc) * (keep.to(acc) * scale)).to(x.dtype)


def check(op: str, p: float, seed: torch.Tensor | None, **tensors: torch.Tensor) -> None:
    """Raise unless the tensors are local floats of one shape and device, and p and seed fit."""
    refuse_dtensor(op, *tensors.values())
    (first, x), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; allowed are fp16, bf16, fp32, fp64")
        if tensor.shape != x.shape or tensor.device != x.device:
            raise ValueError(
                f"{op}: {first} has shape {tuple(x.shape)} on {x.device} and {name} "
                f"{tuple(tensor.shape)} on {tensor.device}; they must agree (expand the smaller)"
            )
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: p={p}; allowed is 0 (keep all) to 1 (drop all)")
    if seed is None:
        return
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64:
        kind = seed.dtype if isinstance(seed, torch.Tensor) else type(seed).__name__
        raise TypeError(f"{op}: seed is {kind}; pass torch.tensor([seed, offset], device=x.device)")
    if seed.shape != (2,) or seed.device != x.device:
        raise ValueError(
            f"{op}: seed has shape {tuple(seed.shape)} on {seed.device}; allowed is (2,) int64 on "
            f"{x.device}: a seed and an offset"
        )


@jit
def _factors(
    seed_ptr, M, N, INNER, number_stride_o, number_stride_m, number_stride_n,
    FOURS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return what multiplies each element of this program's tile: SCALE or 0."""
    if FOURS:  # four neighbours share a counter
        o, m, n, _ = tile(M, tl.cdiv(N, 4), INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N // 4)
        counter = o * (number_stride_o // 4) + m * (number_stride_m // 4) + n
    else:
        o, m, n, _ = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
        number = o * number_stride_o + m * number_stride_m + n * number_stride_n
        counter = number // 4
    offset = tl.load(seed_ptr + 1)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed_ptr),
        counter.to(tl.uint32),
        (counter >> 32).to(tl.uint32),
        offset.to(tl.uint32),
        (offset >> 32).to(tl.uint32),
    )
    if FOURS:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK_M, BLOCK_N)
    else:
        which = number % 4
        words = tl.where(
            which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3)
        )  # fmt: skip
    least = tl.full((1, 1), THRESHOLD, tl.uint32)
    return tl.where(words >= least, tl.full((1, 1), SCALE, ACC), tl.full((1, 1), 0.0, ACC))


@jit
def _dropout_kernel(
    out_ptr, x_ptr, seed_ptr, M, N, INNER,
    out_stride_o, out_stride_m, out_stride_n,
    x_stride_o, x_stride_m, x_stride_n,
    number_stride_o, number_stride_m, number_stride_n,
    FOURS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    x_at = x_ptr + o * x_stride_o + m * x_stride_m + n * x_stride_n
    x = tl.load(x_at, mask=mask, other=0.0).to(ACC)
    out = x * _factors(
        seed_ptr, M, N, INNER, number_stride_o, number_stride_m, number_stride_n,
        FOURS, THRESHOLD, SCALE, ACC, SPLIT_ROWS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_at = out_ptr + o * out_stride_o + m * out_stride_m + n * out_stride_n
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _dropout_add_kernel(
    out_ptr, x_ptr, residual_ptr, seed_ptr, M, N, INNER,
    out_stride_o, out_stride_m, out_stride_n,
    x_stride_o, x_stride_m, x_stride_n,
    residual_stride_o, residual_stride_m, residual_stride_n,
    number_stride_o, number_stride_m, number_stride_n,
    FOURS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    x_at = x_ptr + o * x_stride_o + m * x_stride_m + n * x_stride_n
    residual_at = residual_ptr + o * residual_stride_o
    residual_at += m * residual_stride_m + n * residual_stride_n
    x = tl.load(x_at, mask=mask, other=0.0).to(ACC)
    residual = tl.load(residual_at, mask=mask, other=0.0).to(ACC)
    out = residual + x * _factors(
        seed_ptr, M, N, INNER, number_stride_o, number_stride_m, number_stride_n,
        FOURS, THRESHOLD, SCALE, ACC, SPLIT_ROWS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_at = out_ptr + o * out_stride_o + m * out_stride_m + n * out_stride_n
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def _empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an output in x's order of memory where three dimensions walk it and the numbers."""
    formats = torch.contiguous_format, _MEMORY_FORMATS.get(x.ndim, torch.contiguous_format)
    if x.ndim <= 3 or any(x.is_contiguous(memory_format=each) for each in formats):
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _launch(
    rule: Rule,
    kernel: Any,
    out: torch.Tensor,
    read: Sequence[torch.Tensor],
    seed: torch.Tensor,
    p: float,
) -> None:
    if out.numel() == 0:
        return
    tensors = out, *read
    if all(tensor.is_contiguous() for tensor in tensors):
        dims: list[tuple[int, ...]] = [(out.numel(), *[1] * (len(tensors) + 1))]
    else:
        numbers = [prod(out.shape[dim + 1 :]) for dim in range(out.ndim)]
        dims = merge_dims(out.shape, *(tensor.stride() for tensor in tensors), numbers)
        if len(dims) > 3:
            copies = [torch.empty_like(out, dtype=each.dtype).copy_(each) for each in read]
            return _launch(rule, kernel, out, copies, seed, p)
    still = (1, *[0] * (len(tensors) + 1))
    outer, inner, columns = (*[still] * (3 - len(dims)), *dims)
    rows = outer[0] * inner[0]
    chosen = rule((rows, columns[0]), out.dtype, launch_gpu(out.device))
    threshold, scale = threshold_and_scale(p)
    fours = columns[-1] == 1 and outer[-1] % 4 == inner[-1] % 4 == 0 and chosen.block_n >= 4
    kernel[(triton.cdiv(rows, chosen.block_m) * triton.cdiv(columns[0], chosen.block_n),)](
        *tensors,
        seed.contiguous(),
        rows,
        columns[0],
        inner[0],
        *[step for steps in zip(outer[1:], inner[1:], columns[1:], strict=True) for step in steps],
        FOURS=fours,
        THRESHOLD=threshold,
        SCALE=scale,
        ACC=triton_accumulator(out.dtype),
        SPLIT_ROWS=outer[0] > 1,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        num_warps=chosen.num_warps,
    )


@dataclass(frozen=True)
class Dropout:
    """Dropout as torch ops under a name; they are linear, so they are their own backward.

    Attributes:
        name: of the torch op (nearlight::<name>_fwd).
        rule: chooses the launch.
    """

    name: str
    rule: Rule

    def apply(
        self, x: torch.Tensor, seed: torch.Tensor, p: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return x with the mask of the seed, in `dtype`."""
        out = _empty_like(x, dtype)
        _launch(self.rule, _dropout_kernel, out, [x], seed, p)
        return out

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, p: float
    ) -> torch.Tensor:
        """Return residual + x with the mask of the seed, in the dtype both promote to."""
        out = _add_fake(x, residual, seed, p)
        _launch(self.rule, _dropout_add_kernel, out, [x, residual], seed, p)
        return out

    def register(self) -> Callable[..., torch.Tensor]:
        """Define dropout and return what to call."""

        def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
            return op(dout, *ctx.saved_tensors, ctx.p, ctx.dtype), None, None, None

        op = register_op(
            f"{self.name}_fwd(Tensor x, Tensor seed, float p, ScalarType dtype) -> Tensor",
            self.apply,
            fake=lambda x, seed, p, dtype: _empty_like(x, dtype),
            cost=_cost,
            backward=backward,
            save=_save,
            is_static=True,
        )
        return op

    def register_add(self, dropout_op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Define dropout with a residual, whose backward is that of dropout, and return it."""

        def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
            dx = dresidual = None
            if ctx.needs_input_grad[0]:
                dx = dropout_op(dout, *ctx.saved_tensors, ctx.p, ctx.dtype)
            if ctx.needs_input_grad[1]:
                dresidual = dout.to(ctx.residual_dtype)
            return dx, dresidual, None, None

        return register_op(
            f"{self.name}_fwd(Tensor x, Tensor residual, Tensor seed, float p) -> Tensor",
            self.add,
            fake=_add_fake,
            cost=_cost,
            backward=backward,
            save=_save,
            is_static=True,
        )


def _add_fake(
    x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, p: float
) -> torch.Tensor:
    return _empty_like(x, torch.promote_types(x.dtype, residual.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, seed, ctx.p = (each for each in inputs if not isinstance(each, torch.dtype))
    ctx.dtype, ctx.residual_dtype = tensors[0].dtype, tensors[-1].dtype
    ctx.save_for_backward(seed)


def _cost(args: Sequence[Any], kwargs: Any, out: torch.Tensor) -> Cost:
    """Count each tensor once, a product per element and a sum per residual."""
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dtype in FLOATS]
    return Cost(
        flops={accumulator_pipe(out.dtype): len(tensors) * out.numel()},
        bytes_read=sum(map(tensor_bytes, tensors)),
        bytes_written=tensor_bytes(out),
    )

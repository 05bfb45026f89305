"""Activations, alone or as the gate of a second factor: kernels, torch ops, and their costs.

    out = f(x)               dx = dout · f'(x)
    out = f(gate) · up       dgate = dout · up · f'(gate)       dup = dout · f(gate)

Computed in fp32 (fp64 for fp64 inputs) and rounded once. The backward reads its inputs again
instead of saving anything, and writes into none of them.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.language.extra import libdevice

from nearlight.core.cost import Cost, Formula, tensor_bytes
from nearlight.core.pointwise import Rule, launch, tile
from nearlight.core.register import register_op
from nearlight.core.rows import accumulator_pipe
from nearlight.core.triton import jit

# Operations of the forward and the backward per element; exp and a division are one each.
_FLOPS = {"silu": (4, 9), "gelu": (18, 21), "gelu_tanh": (9, 17), "relu2": (2, 3)}


@jit
def _exp_minus(x, PRECISE: tl.constexpr):
    """Return exp(−x), to the last bit or two of fp32 where PRECISE."""
    if PRECISE:
        # The GPU's exp multiplies by log2(e) first, which costs |x| units in the last place. So
        # take 2^n out (Cody and Waite): ln 2 is split such that n times its head is exact.
        y = tl.minimum(tl.maximum(-x, -104.0), 89.5)
        n = tl.floor(y * 1.4426950408889634 + 0.5)
        f = (y - n * 0.693359375) + n * 2.12194440e-4
        return tl.exp2(n) * tl.exp(f)
    return tl.exp(-x)


@jit
def _sigmoid(x, PRECISE: tl.constexpr, WHOLE_REST: tl.constexpr):
    """Return 1 / (1 + exp(−x)) and what it lacks to 1, with all its digits where WHOLE_REST."""
    decay = _exp_minus(x, PRECISE)
    sigmoid = 1.0 / (1.0 + decay)
    if WHOLE_REST:  # 1 − sigmoid cancels above 0
        return sigmoid, tl.where(x > 0, decay * sigmoid, 1.0 - sigmoid)
    return sigmoid, 1.0 - sigmoid


@jit
def _gelu(x, ACC: tl.constexpr, PRECISE: tl.constexpr):
    """Return x Φ(x), Φ the distribution of the normal law, and the derivative."""
    if PRECISE or ACC == tl.float64:
        bell = tl.exp(-0.5 * x * x)
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # erf, a division and exp with its subnormals take more instructions than the memory
        # leaves time for. Φ(−|x|) over the bell is within 2e-5 of this polynomial (fitted here,
        # |x| ≤ 13.5), and Φ does not cancel below 0.
        bell = libdevice.fast_expf(-0.5 * x * x)
        t = tl.rsqrt(1.0 + 0.45 * tl.abs(x))
        tail = 2.70023278 + t * (-4.23572281 + t * (3.80970924 - t * 1.18613865))
        tail = -0.0123585718 + t * (0.166211688 + t * (-0.741942854 + t * tail))
        tail *= bell
        cdf = tl.where(x < 0, tail, 1.0 - tail)
    return x * cdf, cdf + x * (bell * 0.3989422804014327)


@jit
def _gelu_tanh(x, ACC: tl.constexpr, PRECISE: tl.constexpr):
    """Return x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³), and the derivative."""
    # (1 + tanh u) / 2 is the sigmoid of 2 u, which does not cancel below 0. x² must not overflow
    # into a derivative of 0 times infinity; where it ends, the sigmoid has long been 0 or 1.
    square = tl.minimum(x * x, 1e6)
    double_u = x * (1.5957691216057308 + 0.07135481627260025 * square)
    share, rest = _sigmoid(double_u, PRECISE, PRECISE or ACC == tl.float64)
    inner = 1.5957691216057308 + 0.21406444881780073 * square
    return x * share, share + x * (share * rest) * inner


@jit
def _activate(x, NAME: tl.constexpr, ACC: tl.constexpr, PRECISE: tl.constexpr):
    """Return an activation and its derivative."""
    if NAME == "gelu":
        value, slope = _gelu(x, ACC, PRECISE)
    elif NAME == "gelu_tanh":
        value, slope = _gelu_tanh(x, ACC, PRECISE)
    elif NAME == "relu2":
        positive = tl.where(x < 0, 0.0, x)  # NaN stays
        value, slope = positive * positive, 2.0 * positive
    else:
        sigmoid, rest = _sigmoid(x, PRECISE, PRECISE)
        value, slope = x * sigmoid, sigmoid * (1.0 + x * rest)
    return value, slope


@jit
def _unary_fwd_kernel(
    out_ptr, x_ptr, M, N, INNER,
    out_stride_o, out_stride_m, out_stride_n,
    x_stride_o, x_stride_m, x_stride_n,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    x_at = x_ptr + o * x_stride_o + m * x_stride_m + n * x_stride_n
    x = tl.load(x_at, mask=mask, other=0.0).to(ACC)
    out, _ = _activate(x, ACTIVATION, ACC, PRECISE)
    out_at = out_ptr + o * out_stride_o + m * out_stride_m + n * out_stride_n
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _unary_bwd_kernel(
    dx_ptr, dout_ptr, x_ptr, M, N, INNER,
    dx_stride_o, dx_stride_m, dx_stride_n,
    dout_stride_o, dout_stride_m, dout_stride_n,
    x_stride_o, x_stride_m, x_stride_n,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    dout_at = dout_ptr + o * dout_stride_o + m * dout_stride_m + n * dout_stride_n
    x_at = x_ptr + o * x_stride_o + m * x_stride_m + n * x_stride_n
    dout = tl.load(dout_at, mask=mask, other=0.0).to(ACC)
    x = tl.load(x_at, mask=mask, other=0.0).to(ACC)
    _, slope = _activate(x, ACTIVATION, ACC, PRECISE)
    dx = dout * slope
    if ACTIVATION == "relu2":  # as torch: an infinite gradient stops at a rectified element
        dx = tl.where(x <= 0, 0.0, dx)
    dx_at = dx_ptr + o * dx_stride_o + m * dx_stride_m + n * dx_stride_n
    tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
def _gated_fwd_kernel(
    out_ptr, gate_ptr, up_ptr, M, N, INNER,
    out_stride_o, out_stride_m, out_stride_n,
    gate_stride_o, gate_stride_m, gate_stride_n,
    up_stride_o, up_stride_m, up_stride_n,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    gate_at = gate_ptr + o * gate_stride_o + m * gate_stride_m + n * gate_stride_n
    up_at = up_ptr + o * up_stride_o + m * up_stride_m + n * up_stride_n
    gate = tl.load(gate_at, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_at, mask=mask, other=0.0).to(ACC)
    value, _ = _activate(gate, ACTIVATION, ACC, PRECISE)
    out_at = out_ptr + o * out_stride_o + m * out_stride_m + n * out_stride_n
    tl.store(out_at, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _gated_bwd_kernel(
    dgate_ptr, dup_ptr, dout_ptr, gate_ptr, up_ptr, M, N, INNER,
    dgate_stride_o, dgate_stride_m, dgate_stride_n,
    dup_stride_o, dup_stride_m, dup_stride_n,
    dout_stride_o, dout_stride_m, dout_stride_n,
    gate_stride_o, gate_stride_m, gate_stride_n,
    up_stride_o, up_stride_m, up_stride_n,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PRECISE: tl.constexpr, SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o, m, n, mask = tile(M, N, INNER, SPLIT_ROWS, BLOCK_M, BLOCK_N)
    dout_at = dout_ptr + o * dout_stride_o + m * dout_stride_m + n * dout_stride_n
    gate_at = gate_ptr + o * gate_stride_o + m * gate_stride_m + n * gate_stride_n
    up_at = up_ptr + o * up_stride_o + m * up_stride_m + n * up_stride_n
    dout = tl.load(dout_at, mask=mask, other=0.0).to(ACC)
    gate = tl.load(gate_at, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_at, mask=mask, other=0.0).to(ACC)
    value, slope = _activate(gate, ACTIVATION, ACC, PRECISE)
    dgate_at = dgate_ptr + o * dgate_stride_o + m * dgate_stride_m + n * dgate_stride_n
    dup_at = dup_ptr + o * dup_stride_o + m * dup_stride_m + n * dup_stride_n
    tl.store(dgate_at, (dout * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_at, (dout * value).to(dup_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Unary:
    """An activation as torch ops, under their own name.

    Attributes:
        name: of the torch ops ("gelu_tanh": nearlight::gelu_tanh_fwd, …_bwd).
        activation: "silu", "gelu", "gelu_tanh" or "relu2".
        rule: chooses the launch.
    """

    name: str
    activation: str
    rule: Rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f(x), in x's order of memory."""
        out = torch.empty_like(x)
        launch(self.rule, _unary_fwd_kernel, [out], [x], ACTIVATION=self.activation)
        return out

    def backward(self, dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x."""
        dx = torch.empty_like(x)
        launch(self.rule, _unary_bwd_kernel, [dx], [dout, x], ACTIVATION=self.activation)
        return dx

    def register(self) -> Callable[..., torch.Tensor]:
        """Define the torch ops and return the forward's."""
        backward_op = register_op(
            f"{self.name}_bwd(Tensor dout, Tensor x) -> Tensor",
            self.backward,
            fake=lambda dout, x: torch.empty_like(x),
            cost=_cost_of(_FLOPS[self.activation][1]),
            is_static=True,
        )
        return register_op(
            f"{self.name}_fwd(Tensor x) -> Tensor",
            self.forward,
            fake=torch.empty_like,
            cost=_cost_of(_FLOPS[self.activation][0]),
            backward=lambda ctx, dout: backward_op(dout, *ctx.saved_tensors),
            save=_save,
            is_static=True,
        )


@dataclass(frozen=True)
class Gated:
    """An activation times a second factor as torch ops; attributes as in `Unary`."""

    name: str
    activation: str
    rule: Rule

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return f(gate) · up, in gate's order of memory."""
        out = torch.empty_like(gate)
        launch(self.rule, _gated_fwd_kernel, [out], [gate, up], ACTIVATION=self.activation)
        return out

    def backward(
        self, dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of gate and up."""
        dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
        self._backward([dgate, dup], [dout, gate, up])
        return dgate, dup

    def packed_forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return out for gate and up in one tensor."""
        return self.forward(*_halves(gate_up))

    def packed_backward(self, dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the one tensor that holds gate and up."""
        dgate_up = torch.empty_like(gate_up)
        self._backward([*_halves(dgate_up)], [dout, *_halves(gate_up)])
        return dgate_up

    def _backward(self, written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        launch(self.rule, _gated_bwd_kernel, written, read, ACTIVATION=self.activation)

    def register(self) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Define the torch ops and return the forward's, of two tensors and of a packed one."""
        forward_flops, backward_flops = _FLOPS[self.activation]
        forward_cost, backward_cost = _cost_of(forward_flops + 1), _cost_of(backward_flops + 2)
        backward_op = register_op(
            f"{self.name}_bwd(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)",
            self.backward,
            fake=lambda dout, gate, up: (torch.empty_like(gate), torch.empty_like(gate)),
            cost=backward_cost,
            is_static=True,
        )
        packed_backward_op = register_op(
            f"{self.name}_packed_bwd(Tensor dout, Tensor gate_up) -> Tensor",
            self.packed_backward,
            fake=lambda dout, gate_up: torch.empty_like(gate_up),
            cost=backward_cost,
            is_static=True,
        )
        forward_op = register_op(
            f"{self.name}_fwd(Tensor gate, Tensor up) -> Tensor",
            self.forward,
            fake=lambda gate, up: torch.empty_like(gate),
            cost=forward_cost,
            backward=lambda ctx, dout: backward_op(dout, *ctx.saved_tensors),
            save=_save,
            is_static=True,
        )
        packed_forward_op = register_op(
            f"{self.name}_packed_fwd(Tensor gate_up) -> Tensor",
            self.packed_forward,
            fake=lambda gate_up: torch.empty_like(_halves(gate_up)[0]),
            cost=forward_cost,
            backward=lambda ctx, dout: packed_backward_op(dout, *ctx.saved_tensors),
            save=_save,
            is_static=True,
        )
        return forward_op, packed_forward_op


def _halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = packed.shape[-1] // 2
    return packed.narrow(-1, 0, width), packed.narrow(-1, width, width)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cost_of(flops: int) -> Formula:
    """Return the formula that counts each tensor once, and so many operations per element."""

    def cost(args: Sequence[torch.Tensor], kwargs: Any, results: Any) -> Cost:
        written = [results] if isinstance(results, torch.Tensor) else results
        # A packed tensor has two per element.
        elements = min(args[0].numel(), written[0].numel())
        return Cost(
            flops={accumulator_pipe(args[0].dtype): flops * elements},
            bytes_read=sum(tensor_bytes(tensor) for tensor in args),
            bytes_written=sum(tensor_bytes(tensor) for tensor in written),
        )

    return cost

"""A sound op, x · weight with a sum over rows in its backward, and twins with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core import backend as backends
from nearlight.core.cost import Cost
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op
from nearlight.core.register import register_op
from nearlight.core.triton import jit

BLOCK_M, BLOCK_N = 8, 16


@jit
def _scale_fwd_kernel(
    x_ptr, w_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_w,
    FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    inside = (rows < M) & (columns < N)
    written = inside
    if FAULT == "no tail mask":
        written = rows < M + 0 * columns
    if FAULT == "unwritten row":
        written = inside & (rows != 1)
    x = tl.load(x_ptr + rows * stride_xm + columns * stride_xn, inside, 0.0)
    w = tl.load(w_ptr + columns * stride_w, columns < N, 0.0)
    y = x.to(tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + rows * N + columns, y, written)
    if FAULT == "one past the end":
        tl.store(y_ptr + (rows * 0 + columns * 0 + M) * N, y, inside)
    if FAULT == "input in place":
        tl.store(x_ptr + rows * stride_xm + columns * stride_xn, y, inside)


@jit
def _scale_bwd_kernel(
    g_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, M, N,
    stride_gm, stride_gn, stride_xm, stride_xn, stride_w,
    FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    w = tl.load(w_ptr + columns * stride_w, columns < N, 0.0).to(tl.float32)
    total = tl.zeros((1, BLOCK_N), tl.bfloat16 if FAULT == "sums in bf16" else tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        inside = (rows < M) & (columns < N)
        x = tl.load(x_ptr + rows * stride_xm + columns * stride_xn, inside, 0.0).to(tl.float32)
        if FAULT == "assumes contiguous upstream":
            g = tl.load(g_ptr + rows * N + columns, inside, 0.0).to(tl.float32)
        else:
            g = tl.load(g_ptr + rows * stride_gm + columns * stride_gn, inside, 0.0)
            g = g.to(tl.float32)
        if FAULT == "ignores upstream":
            g = tl.where(inside, 1.0, 0.0)
        total = (total + tl.sum(g * x, 0)[None, :]).to(total.dtype)
        dx = g * w * (1.01 if FAULT == "wrong factor" else 1.0)
        tl.store(dx_ptr + rows * N + columns, dx, inside)
        if FAULT == "upstream overwritten":
            tl.store(g_ptr + rows * stride_gm + columns * stride_gn, dx, inside)
        if FAULT == "backward writes into its input":
            tl.store(x_ptr + rows * stride_xm + columns * stride_xn, dx, inside)
    tl.store(dw_ptr + columns, total, columns < N)


_kept: dict[Any, torch.Tensor] = {}


def _forward(x: torch.Tensor, weight: torch.Tensor, fault: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if fault == "same memory for two calls":
        y = _kept.setdefault((x.shape, x.dtype), y)
    M, N = x.shape
    if x.numel():
        grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
        _scale_fwd_kernel[grid](
            x, weight, y, M, N, *x.stride(), weight.stride(0),
            FAULT=fault, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        )  # fmt: skip
    return y


def _backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    if fault == "empty batch leaves garbage":
        dw = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    M, N = x.shape
    if x.numel():
        _scale_bwd_kernel[(triton.cdiv(N, BLOCK_N),)](
            g, x, weight, dx, dw, M, N, *g.stride(), *x.stride(), weight.stride(0),
            FAULT=fault, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        )  # fmt: skip
    return dx, dw


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.fault = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # A double backward is refused by the backward op, where it is not hidden from autograd.
    with torch.set_grad_enabled(torch.is_grad_enabled() and ctx.fault != "loses double backward"):
        dx, dw = torch.ops.twins.scale_bwd(g, *ctx.saved_tensors, ctx.fault)
    if ctx.fault == "second backward differs":
        ctx.calls = getattr(ctx, "calls", 0) + 1
        dx = dx / ctx.calls
    if ctx.fault == "no weight gradient when x is frozen" and not ctx.needs_input_grad[0]:
        return None, None, None
    return dx, dw, None


def _empty(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


register_op(
    "twins::scale_bwd(Tensor g, Tensor x, Tensor weight, str fault) -> (Tensor, Tensor)",
    _backward,
    fake=lambda g, x, weight, fault: (_empty(x), _empty(weight)),
    cost=lambda args, kwargs, out: Cost(),
)
register_op(
    "twins::scale_fwd(Tensor x, Tensor weight, str fault) -> Tensor",
    _forward,
    fake=lambda x, weight, fault: _empty(x),
    cost=lambda args, kwargs, out: Cost(),
    backward=_differentiate,
    save=_save,
)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, columns = case.shape["rows"], case.shape["columns"]

    def random(*shape: int) -> torch.Tensor:
        wide = torch.promote_types(case.dtype, torch.float32)
        values = torch.randn(shape, generator=generator, device=device, dtype=wide)
        return values.to(case.dtype).requires_grad_()

    return {"x": random(rows, columns), "weight": random(columns)}


def twin(fault: str, **fields: Any) -> Op:
    """Return the op with one fault planted; "" is the sound one."""

    def scale(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        if not backends.use_triton(backend, x):
            return reference(x, weight)
        if fault == "refuses transposed" and x.stride(-1) != 1:
            raise ValueError(f"x: strides {x.stride()}, the last must be 1; call x.contiguous()")
        # By name: a file that is loaded again replaces the op.
        return torch.ops.twins.scale_fwd(x, weight, fault)

    shapes = [{"rows": 5, "columns": 33}, {"rows": 9, "columns": 16}]
    return Op(
        name=f"scale ({fault or 'sound'})",
        function=scale,
        reference=reference,
        make_inputs=make_inputs,
        cases=[Case("64x128", {"rows": 64, "columns": 128}, torch.float32)],
        check_cases=[
            *(Case("small", shape, torch.float32) for shape in shapes),
            Case("tall", {"rows": 400, "columns": 3}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
        **fields,
    )


FAULTS = (
    "no tail mask",
    "unwritten row",
    "one past the end",
    "input in place",
    "sums in bf16",
    "assumes contiguous upstream",
    "ignores upstream",
    "wrong factor",
    "upstream overwritten",
    "backward writes into its input",
    "same memory for two calls",
    "loses double backward",
    "second backward differs",
    "no weight gradient when x is frozen",
    "empty batch leaves garbage",
)


def _all_equal(inputs: Inputs) -> Inputs:
    return {**inputs, "x": torch.ones_like(inputs["x"]).requires_grad_()}


def _wrong_width(inputs: Inputs) -> Inputs:
    return {**inputs, "weight": torch.ones(inputs["x"].shape[1] + 1)}


_CASE = Case("4x8", {"rows": 4, "columns": 8}, torch.float32)
WITH_EXTREMES = twin("", extremes=[Extreme("all equal", _CASE, _all_equal)])
MISSES_ERROR = twin("", extremes=[Extreme("wrong width", _CASE, _wrong_width, ValueError)])
WRONG_FACTOR = twin("wrong factor")
REFUSES = twin("refuses transposed", refused_layouts={"x": ["transposed", "strided", "expanded"]})
UNDECLARED = twin("refuses transposed")


def _builds(max_registers: int) -> Callable[[str], list[KernelBuild]]:
    signature = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*fp32")
    signature |= dict.fromkeys(("M", "N", "stride_xm", "stride_xn", "stride_w"), "i64")
    constants = {"FAULT": "", "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    build = KernelBuild(_scale_fwd_kernel, signature, constants, max_registers=max_registers)
    return lambda arch: [build]


def _refuse(arch: str) -> list[KernelBuild]:
    raise ValueError("needs sm_80")


OP = twin("", builds=_builds(64))
TIGHT = twin("", builds=_builds(8))
REFUSES_ARCH = twin("", builds=_refuse)
UNKNOWN_FAMILY = twin("", refused_layouts={"x": ["diagonal"]})

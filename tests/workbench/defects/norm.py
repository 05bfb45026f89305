"""RMS norm in Triton: a sound op, and twins with one fault each.

    y = x · r · weight,  r = 1 / √(mean x² + ε)
    g = dout · weight,  dx = r · (g − x · r² · mean(g · x))

Every place that says `FAULT` or `fault` is a fault; without them the op is right.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, Op
from nearlight.core.register import register_op
from nearlight.core.rows import refuse_dtensor
from nearlight.core.triton import jit

EPS = 1e-5


@jit
def _root(x, N, EPS: tl.constexpr, FAULT: tl.constexpr, BLOCK_N: tl.constexpr):
    mean = tl.sum(x * x, 0) / (BLOCK_N if FAULT == "mean of the tile" else N)
    if FAULT == "epsilon outside the root":
        return 1.0 / (tl.sqrt(mean) + EPS)
    return 1.0 / tl.sqrt(mean + EPS)


@jit
def _norm_fwd_kernel(
    x_ptr, w_ptr, y_ptr, N, stride_xm, stride_xn, stride_w,
    EPS: tl.constexpr, FAULT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    inside = columns < N
    x = tl.load(x_ptr + row * stride_xm + columns * stride_xn, inside, 0.0).to(tl.float32)
    w = tl.load(w_ptr + columns * stride_w, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row * N + columns, x * _root(x, N, EPS, FAULT, BLOCK_N) * w, inside)


@jit
def _norm_bwd_kernel(
    g_ptr, x_ptr, w_ptr, dx_ptr, parts_ptr, N,
    stride_gm, stride_gn, stride_xm, stride_xn, stride_w,
    EPS: tl.constexpr, FAULT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    inside = columns < N
    x = tl.load(x_ptr + row * stride_xm + columns * stride_xn, inside, 0.0).to(tl.float32)
    w = tl.load(w_ptr + columns * stride_w, inside, 0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_gm + columns * stride_gn, inside, 0.0).to(tl.float32)
    r = _root(x, N, EPS, FAULT, BLOCK_N)
    tl.store(parts_ptr + row * N + columns, g * x * r, inside)
    g = g * w
    if FAULT != "root held constant":
        g = g - x * r * r * (tl.sum(g * x, 0) / N)
    tl.store(dx_ptr + row * N + columns, g * r, inside)


def _forward(x: torch.Tensor, weight: torch.Tensor, fault: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, N = x.shape
    num_warps = 4 if fault == "no columns" and 128 // N > 1 else 8
    if x.numel():
        _norm_fwd_kernel[(M,)](
            x, weight, y, N, *x.stride(), weight.stride(0),
            EPS=EPS, FAULT=fault, BLOCK_N=triton.next_power_of_2(N), num_warps=num_warps,
        )  # fmt: skip
    return y


def _backward(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    M, N = x.shape
    if x.numel():
        _norm_bwd_kernel[(M,)](
            dout, x, weight, dx, parts, N, *dout.stride(), *x.stride(), weight.stride(0),
            EPS=EPS, FAULT=fault, BLOCK_N=triton.next_power_of_2(N), num_warps=8,
        )  # fmt: skip
    if fault == "eight rows alone":
        parts = parts[:8]
    return dx, parts.sum(0).to(weight.dtype)


def _register(fault: str) -> Any:
    """Register the op's two torch ops in a namespace of the tests."""
    name = "defects::norm_" + (re.sub(r"\W", "_", fault) or "sound")
    backward_op = register_op(
        f"{name}_bwd(Tensor dout, Tensor x, Tensor weight) -> (Tensor, Tensor)",
        lambda dout, x, weight: _backward(dout, x, weight, fault),
        fake=lambda dout, x, weight: (
            torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight),
        ),
        cost=lambda args, kwargs, out: Cost(),
    )  # fmt: skip
    return register_op(
        f"{name}_fwd(Tensor x, Tensor weight) -> Tensor",
        lambda x, weight: _forward(x, weight, fault),
        fake=lambda x, weight: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, dout: backward_op(dout, *ctx.saved_tensors),
        save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    root = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (wide * root * weight).to(x.dtype)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, columns = case.shape["rows"], case.shape["columns"]

    def random(*shape: int) -> torch.Tensor:
        wide = torch.promote_types(case.dtype, torch.float32)
        values = torch.randn(shape, generator=generator, device=device, dtype=wide)
        return values.to(case.dtype).requires_grad_()

    return {"x": random(rows, columns), "weight": random(columns)}


def twin(fault: str = "") -> Op:
    """Return the op with one fault planted; "" is the sound one."""
    forward_op = _register(fault)

    def norm(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        refuse_dtensor("norm", x, weight)
        return forward_op(x, weight) if use_triton(backend, x) else reference(x, weight)

    def builds(arch: str) -> list[KernelBuild]:
        dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
        with described_launches(gpu_of_arch(arch)) as launches:
            x = torch.empty(1 << 20, 1024, dtype=dtype, device="meta")
            weight = torch.empty(1024, dtype=dtype, device="meta")
            _backward(_forward(x, weight, fault), x, weight, fault)
        return launches

    return Op(
        name=f"norm ({fault or 'sound'})",
        function=norm,
        reference=reference,
        make_inputs=make_inputs,
        cases=[Case("64x128", {"rows": 64, "columns": 128}, torch.float32)],
        check_cases=[
            Case("small", {"rows": 5, "columns": 33}, torch.float32),
            Case("rows", {"rows": 11, "columns": 16}, torch.float32),
            Case("bf16", {"rows": 3, "columns": 16}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 4 * case.shape["rows"] * case.shape["columns"] + 1024,
        builds=builds,
    )


OP = twin()
EPSILON_OUTSIDE = twin("epsilon outside the root")
MEAN_OF_THE_TILE = twin("mean of the tile")
ROOT_CONSTANT = twin("root held constant")
EIGHT_ROWS = twin("eight rows alone")
NO_COLUMNS = twin("no columns")

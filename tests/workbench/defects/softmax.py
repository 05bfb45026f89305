"""Softmax over the columns a mask leaves, in Triton: a row with none of them is zero.

    p = exp(x − max) · mask / Σ exp(x − max) · mask        dx = p · (dout − Σ p · dout)

Every place that says `FAULT` or `fault` is a fault; without them the op is right. One of them:
without a guard a fully masked row divides 0 by 0.
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
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op
from nearlight.core.register import register_op
from nearlight.core.rows import refuse_dtensor
from nearlight.core.triton import jit


@jit
def _softmax_fwd_kernel(
    x_ptr, mask_ptr, p_ptr, N, stride_xm, stride_xn, stride_mm, stride_mn,
    FAULT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    inside = columns < N
    if FAULT == "mask taken as contiguous":
        stride_mm, stride_mn = N, 1
    kept = tl.load(mask_ptr + row * stride_mm + columns * stride_mn, inside, 0) != 0
    x = tl.load(x_ptr + row * stride_xm + columns * stride_xn, inside & kept, 0.0)
    x = tl.where(inside & kept, x.to(tl.float32), float("-inf"))
    top = tl.max(x, 0)
    if FAULT != "no guard":
        top = tl.where(top == float("-inf"), 0.0, top)
    if FAULT == "no maximum":
        top = 0.0
    e = tl.exp(x - top)
    if FAULT == "tail in the sum":
        e = tl.where(inside, e, tl.exp(-top))
    total = tl.sum(e, 0)
    if FAULT != "no guard":
        total = tl.where(total == 0.0, 1.0, total)
    p = e / total
    if FAULT == "even without a key":
        p = tl.where(tl.sum(e, 0) == 0.0, 1.0 / N, p)
    tl.store(p_ptr + row * N + columns, p, inside)


@jit
def _softmax_bwd_kernel(
    g_ptr, p_ptr, dx_ptr, N, stride_gm, stride_gn, FAULT: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    inside = columns < N
    g = tl.load(g_ptr + row * stride_gm + columns * stride_gn, inside, 0.0).to(tl.float32)
    p = tl.load(p_ptr + row * N + columns, inside, 0.0).to(tl.float32)
    if FAULT != "gradient without its sum":
        g = g - tl.sum(p * g, 0)
    tl.store(dx_ptr + row * N + columns, p * g, inside)


def _forward(x: torch.Tensor, mask: torch.Tensor, fault: str) -> torch.Tensor:
    p = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, N = x.shape
    if x.numel():
        _softmax_fwd_kernel[(M,)](
            x, mask, p, N, *x.stride(), *mask.stride(),
            FAULT=fault, BLOCK_N=triton.next_power_of_2(N),
        )  # fmt: skip
    return p


def _backward(dout: torch.Tensor, p: torch.Tensor, fault: str) -> torch.Tensor:
    dx = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    M, N = p.shape
    if p.numel():
        block = triton.next_power_of_2(N)
        _softmax_bwd_kernel[(M,)](dout, p, dx, N, *dout.stride(), FAULT=fault, BLOCK_N=block)
    return dx


def reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    masked = torch.where(mask, x, float("-inf"))
    # A row with nothing left would be NaN, and its gradient with it.
    masked = torch.where(mask.any(-1, keepdim=True), masked, 0.0)
    return torch.where(mask, torch.softmax(masked, -1), 0.0)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = (case.shape["rows"], case.shape["columns"])
    wide = torch.promote_types(case.dtype, torch.float32)
    x = torch.randn(shape, generator=generator, device=device, dtype=wide).to(case.dtype)
    mask = torch.rand(shape, generator=generator, device=device) < 0.7
    mask[:, :1] = True
    return {"x": x.requires_grad_(), "mask": mask}


def _nothing_left(inputs: Inputs) -> Inputs:
    mask = inputs["mask"].clone()
    mask[1] = False
    return {**inputs, "mask": mask}


def twin(fault: str = "") -> Op:
    """Return the op with one fault planted; "" is the sound one."""
    name = "defects::softmax_" + (re.sub(r"\W", "_", fault) or "sound")
    backward_op = register_op(
        f"{name}_bwd(Tensor dout, Tensor p) -> Tensor",
        lambda dout, p: _backward(dout, p, fault),
        fake=lambda dout, p: torch.empty(p.shape, dtype=p.dtype, device=p.device),
        cost=lambda args, kwargs, out: Cost(),
    )

    def save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    forward_op = register_op(
        f"{name}_fwd(Tensor x, Tensor mask) -> Tensor",
        lambda x, mask: _forward(x, mask, fault),
        fake=lambda x, mask: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, dout: (backward_op(dout, *ctx.saved_tensors), None),
        save=save,
    )

    def softmax(x: torch.Tensor, mask: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        refuse_dtensor("softmax", x, mask)
        return forward_op(x, mask) if use_triton(backend, x) else reference(x, mask)

    def builds(arch: str) -> list[KernelBuild]:
        dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
        with described_launches(gpu_of_arch(arch)) as launches:
            x = torch.empty(1 << 20, 4096, dtype=dtype, device="meta")
            mask = torch.empty(x.shape, dtype=torch.bool, device="meta")
            _backward(x, _forward(x, mask, fault), fault)
        return launches

    return Op(
        name=f"softmax ({fault or 'sound'})",
        function=softmax,
        reference=reference,
        make_inputs=make_inputs,
        cases=[Case("64x128", {"rows": 64, "columns": 128}, torch.float32)],
        check_cases=[
            Case("small", {"rows": 5, "columns": 33}, torch.float32),
            Case("bf16", {"rows": 3, "columns": 16}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
        builds=builds,
        extremes=[
            Extreme("a row is masked", Case("4x8", {"rows": 4, "columns": 8}), _nothing_left)
        ],
    )


OP = twin()
MASKED_ROW = twin("no guard")
EVEN_WITHOUT_A_KEY = twin("even without a key")
NO_MAXIMUM = twin("no maximum")
TAIL_IN_THE_SUM = twin("tail in the sum")
WITHOUT_ITS_SUM = twin("gradient without its sum")
MASK_CONTIGUOUS = twin("mask taken as contiguous")

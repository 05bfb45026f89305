"""x · weight per column in Triton: a sound op, and twins with one fault each.

Every place that says `FAULT` or `fault` is a fault; without them the op is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import count
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

BLOCK_M, BLOCK_N = 8, 16


@jit
def _scale_fwd_kernel(
    x_ptr, w_ptr, y_ptr, M, N, stride_xm, stride_xn, stride_w,
    FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if FAULT != "int32 offset":
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows < M) & (columns < N)
    written = inside
    if FAULT == "no tail mask":
        written = rows < M + 0 * columns
    if FAULT == "unwritten row":
        written = inside & (rows != 1)
    x = tl.load(x_ptr + rows * stride_xm + columns * stride_xn, inside, 0.0)
    w = tl.load(w_ptr + columns * stride_w, columns < N, 0.0)
    y = x.to(tl.float32) * w.to(tl.float32)
    if FAULT == "reads uninitialised memory":
        y += tl.load(y_ptr + rows * N + columns, inside, 0.0).to(tl.float32)
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
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        inside = (rows < M) & (columns < N)
        x = tl.load(x_ptr + rows * stride_xm + columns * stride_xn, inside, 0.0).to(tl.float32)
        g_place = g_ptr + rows * stride_gm + columns * stride_gn
        if FAULT == "assumes contiguous upstream":
            g_place = g_ptr + rows * N + columns
        g = tl.load(g_place, inside, 0.0).to(tl.float32)
        if FAULT == "ignores upstream":
            g = tl.where(inside, 1.0, 0.0)
        total = (total + tl.sum(g * x, 0)[None, :]).to(total.dtype)
        dx = g * w * (1.01 if FAULT == "wrong factor" else 1.0)
        if FAULT == "unwritten gradient":
            inside = inside & (rows != 1)
        tl.store(dx_ptr + rows * N + columns, dx, inside)
        if FAULT == "upstream overwritten":
            tl.store(g_place, dx, inside)
    if FAULT == "float atomics":
        tl.atomic_add(dw_ptr + columns, total, columns < N)
    else:
        tl.store(dw_ptr + columns, total, columns < N)


_turns = count()
_last: dict[str, Any] = {}  # what the faults that remember keep; it keeps their memory alive, too


def _forward(x: torch.Tensor, weight: torch.Tensor, fault: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, N = x.shape
    if not x.numel():
        return y
    if fault == "undeclared mutation":
        return x.mul_(weight).clone()
    if fault == "replay ignores new values":
        weight = _prepared(weight)
    _scale_fwd_kernel[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, weight, y, M, N, *x.stride(), weight.stride(0),
        FAULT=fault, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return y


def _backward(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, fault: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sum_dtype = torch.float32 if fault == "float atomics" else weight.dtype
    dw = torch.zeros(weight.shape, dtype=sum_dtype, device=x.device)
    M, N = x.shape
    block_m = BLOCK_M >> next(_turns) % 2 if fault == "tile drawn anew" else BLOCK_M
    if x.numel():
        _scale_bwd_kernel[(triton.cdiv(N, BLOCK_N), 8 if fault == "float atomics" else 1)](
            dout, x, weight, dx, dw, M, N, *dout.stride(), *x.stride(), weight.stride(0),
            FAULT=fault, BLOCK_M=block_m, BLOCK_N=BLOCK_N,
        )  # fmt: skip
    return dx, dw.to(weight.dtype)


def _prepared(weight: torch.Tensor) -> torch.Tensor:
    """A copy that is made again when the values change: but no replay of a graph asks for it."""
    kept, version, copy = _last.get("weight", (weight, -1, weight))
    if kept.data_ptr() != weight.data_ptr() or version != weight._version:
        copy = weight.clone()
        _last["weight"] = (weight, weight._version, copy)
    return copy


def _remembered(
    x: torch.Tensor, weight: torch.Tensor, num_calls: int, compute: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """After some calls with the same tensors the result is taken from the one before."""
    key = (x.data_ptr(), weight.data_ptr(), x.shape, x.stride())
    if _last.get("key") != key:
        _last.update(key=key, calls=0, keep=(x, weight))
    _last["calls"] += 1
    if _last["calls"] <= num_calls:
        _last["y"] = compute()
    return _last["y"].clone()


def _fake(x: torch.Tensor, weight: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "wrong fake stride":
        return torch.empty_like(x)  # in x's order of memory; the kernel's output is contiguous
    dtype = torch.float32 if fault == "wrong fake dtype" else x.dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _register(fault: str) -> Callable[..., torch.Tensor]:
    """Register the op's two torch ops in a namespace of the tests."""
    name = "defects::scale_" + (re.sub(r"\W", "_", fault) or "sound")

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_calls = {"cached by pointer": 1, "work skipped": 8}.get(fault)
        if num_calls is None:
            return _forward(x, weight, fault)
        return _remembered(x, weight, num_calls, lambda: _forward(x, weight, fault))

    backward_op = register_op(
        f"{name}_bwd(Tensor dout, Tensor x, Tensor weight) -> (Tensor, Tensor)",
        lambda dout, x, weight: _backward(dout, x, weight, fault),
        fake=lambda dout, x, weight: (_fake(x, weight, ""), torch.empty_like(weight)),
        cost=lambda args, kwargs, out: Cost(),
    )

    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = backward_op(dout, *getattr(ctx, "kept", ctx.saved_tensors))
        if fault == "second backward differs":
            ctx.num_calls = getattr(ctx, "num_calls", 0) + 1
            dx = dx / ctx.num_calls
        return dx, dw

    def save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if fault == "kept out of sight":
            ctx.kept = inputs  # autograd does not see them change
        else:
            ctx.save_for_backward(*inputs)

    fake: Any = None if fault == "missing fake" else partial(_fake, fault=fault)
    return register_op(
        f"{name}_fwd(Tensor x, Tensor weight) -> Tensor",
        forward,
        fake=fake,
        cost=lambda args, kwargs, out: Cost(),
        backward=backward,
        save=save,
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


def twin(fault: str = "") -> Op:
    """Return the op with one fault planted; "" is the sound one."""
    forward_op = _register(fault)

    def scale(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        refuse_dtensor("scale", x, weight)
        return forward_op(x, weight) if use_triton(backend, x) else reference(x, weight)

    def builds(arch: str) -> list[KernelBuild]:
        dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
        with described_launches(gpu_of_arch(arch)) as launches:
            x = torch.empty(1 << 20, 4096, dtype=dtype, device="meta")
            weight = torch.empty(4096, dtype=dtype, device="meta")
            _backward(_forward(x, weight, fault), x, weight, fault)
        return launches

    small = [{"rows": 5, "columns": 33}, {"rows": 9, "columns": 16}]
    return Op(
        name=f"scale ({fault or 'sound'})",
        function=scale,
        reference=reference,
        make_inputs=make_inputs,
        cases=[Case("64x128", {"rows": 64, "columns": 128}, torch.float32)],
        check_cases=[
            *(Case("small", shape, torch.float32) for shape in small),
            Case("tall", {"rows": 400, "columns": 3}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
        builds=builds,
    )


OP = twin()
NO_TAIL_MASK = twin("no tail mask")
INT32_OFFSET = twin("int32 offset")
UNWRITTEN_ROW = twin("unwritten row")
UNWRITTEN_GRADIENT = twin("unwritten gradient")
ONE_PAST_THE_END = twin("one past the end")
READS_UNINITIALISED = twin("reads uninitialised memory")
WRONG_FAKE_STRIDE = twin("wrong fake stride")
WRONG_FAKE_DTYPE = twin("wrong fake dtype")
MISSING_FAKE = twin("missing fake")
UNDECLARED_MUTATION = twin("undeclared mutation")
WRONG_FACTOR = twin("wrong factor")
IGNORES_UPSTREAM = twin("ignores upstream")
CONTIGUOUS_UPSTREAM = twin("assumes contiguous upstream")
INPUT_IN_PLACE = twin("input in place")
UPSTREAM_OVERWRITTEN = twin("upstream overwritten")
SECOND_BACKWARD = twin("second backward differs")
KEPT_OUT_OF_SIGHT = twin("kept out of sight")
SUMS_IN_BF16 = twin("sums in bf16")
FLOAT_ATOMICS = twin("float atomics")
TILE_DRAWN_ANEW = twin("tile drawn anew")
CACHED_BY_POINTER = twin("cached by pointer")
WORK_SKIPPED = twin("work skipped")
REPLAY_IGNORES = twin("replay ignores new values")

"""A contiguous copy of a matrix in Triton, and a twin that saves the copy where it can.

The fault: what is contiguous already is returned as it is, so the output is the input.
"""

from __future__ import annotations

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

BLOCK = 32


@jit
def _pack_kernel(x_ptr, y_ptr, N, stride_xm, stride_xn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + row * stride_xm + columns * stride_xn, columns < N)
    tl.store(y_ptr + row * N + columns, x, columns < N)


def _pack(x: torch.Tensor, returns_alias: bool = False) -> torch.Tensor:
    if returns_alias and x.is_contiguous():
        return x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, N = x.shape
    if x.numel():
        _pack_kernel[(M, triton.cdiv(N, BLOCK))](x, y, N, *x.stride(), BLOCK=BLOCK)
    return y


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_backward_op = register_op(
    "defects::pack_bwd(Tensor dout) -> Tensor",
    _pack,
    fake=_fake,
    cost=lambda args, kwargs, out: Cost(),
)


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = (case.shape["rows"], case.shape["columns"])
    wide = torch.promote_types(case.dtype, torch.float32)
    x = torch.randn(shape, generator=generator, device=device, dtype=wide).to(case.dtype)
    return {"x": x.requires_grad_()}


def twin(fault: str = "") -> Op:
    """Return the op, which always copies or does not."""
    returns_alias = bool(fault)
    forward_op = register_op(
        f"defects::pack_{'alias' if returns_alias else 'copy'}(Tensor x) -> Tensor",
        lambda x: _pack(x, returns_alias),
        fake=_fake,
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, dout: _backward_op(dout),
    )

    def pack(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        refuse_dtensor("pack", x)
        return forward_op(x) if use_triton(backend, x) else reference(x)

    def builds(arch: str) -> list[KernelBuild]:
        with described_launches(gpu_of_arch(arch)) as launches:
            _pack(torch.empty(1 << 20, 4096, dtype=torch.float16, device="meta"))
        return launches

    return Op(
        name=f"pack ({fault or 'sound'})",
        function=pack,
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
    )


OP = twin()
RETURNED_ALIAS = twin("returned alias")

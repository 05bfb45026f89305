"""x − mean of its row in CUDA C++ (center.cu): a sound op, and twins with one fault each.

    y = x − mean(x)        dx = dy − mean(dy), so the backward is the same kernel

A fault of the kernel is a definition that center.cu asks for; those of the launcher stand here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.cuda import Kernel
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, Op
from nearlight.core.register import register_op
from nearlight.core.rows import refuse_dtensor

NUM_THREADS = 128
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}
SOURCE = Path(__file__).with_suffix(".cu")


def _kernels(fault: str) -> dict[torch.dtype, Kernel]:
    defines = ((fault, "1"),) if fault.isupper() else ()
    return {dtype: Kernel(SOURCE, f"center<{name}>", defines) for dtype, name in TYPES.items()}


def _launch(
    kernels: dict[torch.dtype, Kernel], x: torch.Tensor, factor: float, fault: str = ""
) -> torch.Tensor:
    if x.dtype not in kernels:
        raise TypeError(f"center: x is {x.dtype}; allowed are fp32 and bf16")
    device: Any = "cuda" if fault == "current device" and x.is_cuda else x.device
    y = torch.empty(x.shape, dtype=x.dtype, device=device)
    on_stream: Any = contextlib.nullcontext()
    if fault == "wrong stream" and x.is_cuda and not torch.cuda.is_current_stream_capturing():
        on_stream = torch.cuda.stream(torch.cuda.default_stream(x.device))
    if x.numel():
        with on_stream:
            kernels[x.dtype][(x.shape[0],), (NUM_THREADS,)](y, x, x.shape[1], *x.stride(), factor)
    return y


def reference(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = (case.shape["rows"], case.shape["columns"])
    wide = torch.promote_types(case.dtype, torch.float32)
    x = torch.randn(shape, generator=generator, device=device, dtype=wide).to(case.dtype)
    return {"x": x.requires_grad_()}


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def twin(fault: str = "") -> Op:
    """Return the op with one fault planted; "" is the sound one."""
    kernels = _kernels(fault)
    name = f"defects::center_{fault.lower().replace(' ', '_') or 'sound'}"
    backward_op = register_op(
        f"{name}_bwd(Tensor dout) -> Tensor",
        lambda dout: _launch(kernels, dout, 1.01 if fault == "wrong factor" else 1.0),
        fake=_fake,
        cost=lambda args, kwargs, out: Cost(),
    )
    forward_op = register_op(
        f"{name}_fwd(Tensor x) -> Tensor",
        lambda x: _launch(kernels, x, 1.0, fault),
        fake=_fake,
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, dout: backward_op(dout),
    )

    def center(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        refuse_dtensor("center", x)
        return forward_op(x) if use_triton(backend, x) else reference(x)

    def builds(arch: str) -> list[KernelBuild]:
        with described_launches(gpu_of_arch(arch)) as launches:
            for dtype in [torch.float32] if arch == "sm_75" else TYPES:
                _launch(kernels, torch.empty(1 << 20, 4096, dtype=dtype, device="meta"), 1.0)
        return launches

    return Op(
        name=f"center ({fault or 'sound'})",
        function=center,
        reference=reference,
        make_inputs=make_inputs,
        cases=[Case("64x128", {"rows": 64, "columns": 128}, torch.float32)],
        check_cases=[
            Case("small", {"rows": 5, "columns": 33}, torch.float32),
            Case("wide", {"rows": 3, "columns": 300}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
        builds=builds,
    )


OP = twin()
INT32_OFFSET = twin("INT32_OFFSET")
RACE = twin("RACE")
MISSING_BARRIER = twin("MISSING_BARRIER")
ONE_PAST_THE_END = twin("ONE_PAST_THE_END")
UNWRITTEN_COLUMN = twin("UNWRITTEN_COLUMN")
READS_UNINITIALISED = twin("READS_UNINITIALISED")
ASSUMES_CONTIGUOUS = twin("ASSUMES_CONTIGUOUS")
WRONG_FACTOR = twin("wrong factor")
WRONG_STREAM = twin("wrong stream")
CURRENT_DEVICE = twin("current device")

"""SwiGLU: the gated activation between the two projections of a feed-forward block.

    out = gate · s · up, where s = 1 / (1 + exp(−gate))
    dgate = dout · up · s · (1 + gate · (1 − s))        dup = dout · gate · s

Legend: N = width of the block (last dimension), rows = everything before it. gate and up are
(..., N), or one packed (..., 2N) tensor with the gate first, as a single projection gives it.
Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202), equation 6.
Limits: computed in fp32 (fp64 for fp64 inputs) and rounded once; the backward reads gate and up
again instead of saving anything, and writes into neither; no gradient of the gradient. Tensors are
read where they lie; only where more than three dimensions remain that do not merge are they copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops.swiglu.kernels import Config, config
from nearlight.ops.swiglu.registration import (
    backward,
    backward_cost,
    forward,
    forward_cost,
    forward_op,
    packed_backward,
    packed_forward,
    packed_forward_op,
)

__all__ = ["OP", "Config", "config", "reference", "swiglu"]


def reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute SwiGLU as a plain PyTorch model does; arguments as in `swiglu`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Multiply the SiLU of the gate with the up projection.

    out = gate / (1 + exp(−gate)) · up

    Args:
        gate: (..., N) fp16, bf16, fp32 or fp64, any strides, on CPU or CUDA; or (..., 2N), gate
            first and up after it, where `up` is None.
        up: shape, dtype and device of `gate`, any strides.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., N) in the dtype and order of memory of `gate`.

    Raises:
        ValueError: shapes or devices that differ, an odd packed width, or an unknown backend.
        TypeError: a dtype that is not allowed, two dtypes, or a DTensor.

    Source: Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> import torch
        >>> from nearlight.ops import swiglu
        >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    _check(gate, up)
    if not use_triton(backend, gate):
        return reference(gate, up)
    return packed_forward_op(gate) if up is None else forward_op(gate, up)


def _check(gate: torch.Tensor, up: torch.Tensor | None) -> None:
    refuse_dtensor("swiglu", gate, up)
    if gate.dtype not in FLOATS:
        raise TypeError(f"swiglu: gate is {gate.dtype}; allowed are fp16, bf16, fp32, fp64")
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"swiglu: one packed tensor of shape {tuple(gate.shape)}; its last dimension must "
                "be even, gate first and up after it, or pass both gate and up"
            )
        return
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu: gate is {gate.dtype} and up is {up.dtype}; convert one of them")
    if gate.shape != up.shape or gate.device != up.device:
        raise ValueError(
            f"swiglu: gate has shape {tuple(gate.shape)} on {gate.device} and up "
            f"{tuple(up.shape)} on {up.device}; they must agree (expand the smaller one)"
        )


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows of four kinds: plain, tiny and large gates, and gates far below zero."""
    batch, width = case.shape.get("batch", 1), case.shape["N"]
    rows = batch * case.shape["rows"]

    def random(scales: Sequence[float], means: Sequence[float]) -> torch.Tensor:
        kind = torch.arange(rows, device=device) % len(scales)
        values = torch.randn(rows, width, generator=generator, device=device)
        values *= torch.tensor(scales, device=device)[kind, None]
        values = (values + torch.tensor(means, device=device)[kind, None]).to(case.dtype)
        return values.unflatten(0, (batch, -1)) if "batch" in case.shape else values

    gate = random((1.0, 1e-3, 30.0, 0.1), (0.0, 0.0, 0.0, -20.0))
    up = random((1.0, 30.0, 1e-3, 1.0), (0.0, 0.0, 0.0, 100.0))
    if "up" in case.options:  # it is None
        return {"gate": torch.cat([gate, up], dim=-1).requires_grad_(), "up": None}
    return {"gate": gate.requires_grad_(), "up": up.requires_grad_()}


def _cost(case: Case) -> Mapping[str, Cost]:
    rows = case.shape.get("batch", 1) * case.shape["rows"]
    x = torch.empty(rows, case.shape["N"], dtype=case.dtype, device="meta")
    there, back = forward_cost((x, x), {}, x), backward_cost((x, x, x), {}, (x, x))
    return {"forward": there, "forward_backward": there + back}


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    # The two-input backward writes its gradients into gate and up: they hold other values after
    # each call. No clone is made, for the memory so saved is what it is built for.
    def run(gate: torch.Tensor, up: torch.Tensor | None = None) -> Any:
        if up is None:
            return LigerFusedGateUpSiLUMulFunction.apply(gate)
        return LigerSiLUMulFunction.apply(gate, up)

    return run


def _builds(arch: str) -> Sequence[KernelBuild]:
    with described_launches(gpu_of_arch(arch)) as builds:
        for dtype in (torch.float16 if arch == "sm_75" else torch.bfloat16, torch.float32):
            packed = torch.empty(16384, 28672, dtype=dtype, device="meta")
            gate = torch.empty(16384, 14336, dtype=dtype, device="meta")
            backward(forward(gate, gate), gate, gate)
            packed_backward(packed_forward(packed), packed)
    # They leave room for half of an SM's threads, which the streams need.
    return [replace(build, max_registers=64) for build in builds]


def _saturated_rows(inputs: Inputs) -> Inputs:
    gate = inputs["gate"].detach().clone()
    gate[0], gate[1] = 1e4, -1e4
    return {**inputs, "gate": gate.requires_grad_()}


def _case(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    name = f"{rows}x{width}" + (" packed" if options else "")
    return Case(name, {"rows": rows, "N": width}, dtype, options)


OP = Op(
    name="swiglu",
    function=swiglu,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[_case(16384, 14336), _case(8192, 28672), _case(16384, 14336, up=None)],
    check_cases=[
        *(
            _case(rows, width, dtype, **options)
            for rows, width in ((1, 1), (4, 127), (9, 128))
            for dtype in (torch.float32, torch.bfloat16)
            for options in ({}, {"up": None})
        ),
        # Three dimensions, of which views keep the kernel from merging any.
        Case("2x3x7", {"batch": 2, "rows": 3, "N": 7}, torch.float32),
        _case(6, 67, torch.float16),
        _case(6, 67, torch.float64),
        _case(66_001, 1, torch.float32, up=None),
        _case(1, 65_537, torch.bfloat16, up=None),
    ],
    cost=_cost,
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=_builds,
    extremes=[Extreme("gates far from zero", _case(4, 33, torch.float32), _saturated_rows)],
)

"""What the records of activation ops share: refusals, inputs that are not flat, costs, builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.cost import Cost, formula_for
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, normal
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops._activations import Gated, Unary

APPROXIMATIONS = ("none", "tanh")


def check_x(op: str, x: torch.Tensor, name: str = "x") -> None:
    """Raise TypeError unless a tensor is a local one of a float dtype."""
    refuse_dtensor(op, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} is {x.dtype}; allowed are fp16, bf16, fp32, fp64")


def check_gate(op: str, gate: torch.Tensor, up: torch.Tensor | None) -> None:
    """Raise unless gate and up agree, or gate is one packed tensor of even width."""
    check_x(op, gate, "gate")
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"{op}: one packed tensor of shape {tuple(gate.shape)}; its last dimension must "
                "be even, gate first and up after it, or pass both gate and up"
            )
        return
    refuse_dtensor(op, up)
    if gate.dtype != up.dtype:
        raise TypeError(f"{op}: gate is {gate.dtype} and up is {up.dtype}; convert one of them")
    if gate.shape != up.shape or gate.device != up.device:
        raise ValueError(
            f"{op}: gate has shape {tuple(gate.shape)} on {gate.device} and up "
            f"{tuple(up.shape)} on {up.device}; they must agree (expand the smaller one)"
        )


def check_approximate(op: str, approximate: str) -> None:
    """Raise ValueError for an approximation of GELU that does not exist."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(
            f"{op}: approximate={approximate!r}; allowed are 'none' (by erf) and 'tanh'"
        )


def gelu_reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute GELU as a plain PyTorch model does; in fp64 closer to the truth than `F.gelu`."""
    if approximate == "tanh" and x.dtype == torch.float64:
        # The same without 1 − tanh², which cancels: 23 units in the last place of a derivative.
        double_u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        lower, upper = torch.sigmoid(double_u), 1.0 - torch.sigmoid(-double_u)
        return x * torch.where(x > 0, upper, lower)
    return F.gelu(x, approximate=approximate)


def rows_of(
    case: Case,
    device: torch.device,
    generator: torch.Generator,
    scales: Sequence[float] = (1.0, 1e-3, 30.0, 0.1),
    means: Sequence[float] = (0.0, 0.0, 0.0, -20.0),
) -> torch.Tensor:
    """Return random rows of several kinds; by default plain, tiny, large, and far below zero."""
    batch, width = case.shape.get("batch", 1), case.shape["N"]
    rows = batch * case.shape["rows"]
    kind = torch.arange(rows, device=device) % len(scales)
    values = normal(case, device, generator, rows, width)
    values *= torch.tensor(scales, device=device)[kind, None]
    values = (values + torch.tensor(means, device=device)[kind, None]).to(case.dtype)
    return values.unflatten(0, (batch, -1)) if "batch" in case.shape else values


def unary_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return x and the options of the case."""
    return {"x": rows_of(case, device, generator).requires_grad_(), **case.options}


def gated_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return gate and up, or one tensor of both where the case says that up is None."""
    gate = rows_of(case, device, generator)
    up = rows_of(case, device, generator, (1.0, 30.0, 1e-3, 1.0), (0.0, 0.0, 0.0, 100.0))
    if "up" in case.options:
        packed = torch.cat([gate, up], dim=-1).requires_grad_()
        return {"gate": packed, **case.options}
    return {"gate": gate.requires_grad_(), "up": up.requires_grad_(), **case.options}


def cost_of(op: Unary | Gated, case: Case) -> Mapping[str, Cost]:
    """Return the cost of a case: each tensor once, in either direction."""
    rows = case.shape.get("batch", 1) * case.shape["rows"]
    x = torch.empty(rows, case.shape["N"], dtype=case.dtype, device="meta")
    inputs = (x,) if isinstance(op, Unary) else (x, x)
    forward, backward = (formula_for(f"nearlight::{op.name}_{way}") for way in ("fwd", "bwd"))
    assert forward and backward
    there, back = forward(inputs, {}, x), backward((x, *inputs), {}, inputs)
    return {"forward": there, "forward_backward": there + back}


def builds_of(ops: Sequence[Unary | Gated], arch: str) -> list[KernelBuild]:
    """Return the kernels as an arch launches them, with a budget of 64 registers each.

    It leaves room for half of an SM's threads, which the streams need.
    """
    with described_launches(gpu_of_arch(arch)) as builds:
        half = torch.float16 if arch == "sm_75" else torch.bfloat16
        for op in ops:
            for dtype in (half, torch.float32):
                x = torch.empty(16384, 14336, dtype=dtype, device="meta")
                if isinstance(op, Unary):
                    op.backward(op.forward(x), x)
                else:
                    op.backward(op.forward(x, x), x, x)
        if isinstance(ops[0], Gated):  # of the others a packed tensor changes no more
            packed = torch.empty(16384, 28672, dtype=half, device="meta")
            ops[0].packed_backward(ops[0].packed_forward(packed), packed)
    return [replace(build, max_registers=64) for build in builds]


def case_of(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    """Return a case named by its rows, width and options."""
    words = [f"{rows}x{width}"]
    words += ["packed"] if "up" in options else []
    words += [str(options["approximate"])] if options.get("approximate", "none") != "none" else []
    return Case(" ".join(words), {"rows": rows, "N": width}, dtype, options)


def saturated(inputs: Inputs, name: str) -> Inputs:
    """Return inputs whose first two rows lie far above and far below zero."""
    x = inputs[name].detach().clone()
    x[0], x[1] = 1e4, -1e4
    return {**inputs, name: x.requires_grad_()}

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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.op import Case, Extreme, Op
from nearlight.core.pointwise import Config, tunable_config
from nearlight.ops._activation_record import (
    builds_of,
    case_of,
    check_gate,
    cost_of,
    gated_inputs,
    saturated,
)
from nearlight.ops._activations import Gated

__all__ = ["OP", "Config", "config", "reference", "swiglu"]


def reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute SwiGLU as a plain PyTorch model does; arguments as in `swiglu`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


config = tunable_config("swiglu")
kernels = Gated("swiglu", "silu", config)
_forward_op, _packed_forward_op = kernels.register()


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
    check_gate("swiglu", gate, up)
    if not use_triton(backend, gate):
        return reference(gate, up)
    return _packed_forward_op(gate) if up is None else _forward_op(gate, up)


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    # The two-input backward writes its gradients into gate and up: they hold other values after
    # each call. No clone is made, for the memory so saved is what it is built for.
    def run(gate: torch.Tensor, up: torch.Tensor | None = None) -> Any:
        if up is None:
            return LigerFusedGateUpSiLUMulFunction.apply(gate)
        return LigerSiLUMulFunction.apply(gate, up)

    return run


OP = Op(
    name="swiglu",
    function=swiglu,
    reference=reference,
    make_inputs=gated_inputs,
    cases=[
        case_of(16384, 14336),
        case_of(8192, 28672),
        case_of(16384, 14336, up=None),
        case_of(16384, 2880, up=None),
    ],
    check_cases=[
        *(
            case_of(rows, width, dtype, **options)
            for rows, width in ((1, 1), (4, 127), (9, 128))
            for dtype in (torch.float32, torch.bfloat16)
            for options in ({}, {"up": None})
        ),
        # Three dimensions, of which views keep the kernel from merging any.
        Case("2x3x7", {"batch": 2, "rows": 3, "N": 7}, torch.float32),
        case_of(6, 67, torch.float16),
        case_of(6, 67, torch.float64),
        case_of(66_001, 1, torch.float32, up=None),
        case_of(1, 65_537, torch.bfloat16, up=None),
    ],
    cost=partial(cost_of, kernels),
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=partial(builds_of, [kernels]),
    extremes=[
        Extreme(
            "gates far from zero", case_of(4, 33, torch.float32), partial(saturated, name="gate")
        )
    ],
)

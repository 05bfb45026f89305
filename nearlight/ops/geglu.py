"""GEGLU: the feed-forward block's gated activation with a GELU as its gate.

    out = f(gate) · up          dgate = dout · up · f'(gate)          dup = dout · f(gate)
    f(x) = x Φ(x), or with approximate="tanh" x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2

Legend: N = width of the block (last dimension), rows = everything before it; Φ = distribution
function of the normal law. gate and up are (..., N), or one packed (..., 2N) tensor, gate first.
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

from nearlight.core.backend import use_triton
from nearlight.core.op import Case, Extreme, Op
from nearlight.core.pointwise import Config, tunable_config
from nearlight.ops._activation_record import (
    builds_of,
    case_of,
    check_approximate,
    check_gate,
    cost_of,
    gated_inputs,
    gelu_reference,
    saturated,
)
from nearlight.ops._activations import Gated

__all__ = ["OP", "Config", "config", "geglu", "reference"]


def reference(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    """Compute GEGLU as a plain PyTorch model does; arguments as in `geglu`."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return gelu_reference(gate, approximate) * up


config = tunable_config("geglu")
kernels = {
    "none": Gated("geglu", "gelu", config),
    "tanh": Gated("geglu_tanh", "gelu_tanh", config),
}
_ops = {approximate: gated.register() for approximate, gated in kernels.items()}


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    approximate: str = "none",
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply the GELU of the gate with the up projection.

    out = gate · Φ(gate) · up

    Args:
        gate: (..., N) fp16, bf16, fp32 or fp64, any strides, on CPU or CUDA; or (..., 2N), gate
            first and up after it, where `up` is None.
        up: shape, dtype and device of `gate`, any strides.
        approximate: "none", or "tanh" for the form of GPT-2 and Gemma.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., N) in the dtype and order of memory of `gate`.

    Raises:
        ValueError: shapes or devices that differ, an odd packed width, an unknown approximation
            or backend.
        TypeError: a dtype that is not allowed, two dtypes, or a DTensor.

    Source: Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Example:
        >>> import torch
        >>> from nearlight.ops import geglu
        >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.6827])
    """
    check_gate("geglu", gate, up)
    check_approximate("geglu", approximate)
    if not use_triton(backend, gate):
        return reference(gate, up, approximate)
    forward_op, packed_forward_op = _ops[approximate]
    return packed_forward_op(gate) if up is None else forward_op(gate, up)


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    # Its backward writes its gradients into gate and up; see swiglu.
    def run(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "none") -> Any:
        if approximate != "tanh":
            raise NotImplementedError("liger-kernel has the tanh form alone")
        return LigerGELUMulFunction.apply(*(gate.chunk(2, dim=-1) if up is None else (gate, up)))

    return run


OP = Op(
    name="geglu",
    function=geglu,
    reference=reference,
    make_inputs=gated_inputs,
    cases=[
        case_of(16384, 14336),
        case_of(16384, 14336, approximate="tanh"),
        case_of(16384, 14336, up=None, approximate="tanh"),
        case_of(16384, 2880, up=None),
    ],
    check_cases=[
        *(
            case_of(rows, width, dtype, **options)
            for rows, width in ((1, 1), (9, 127))
            for dtype in (torch.float32, torch.bfloat16)
            for options in ({}, {"up": None, "approximate": "tanh"})
        ),
        # Three dimensions, of which views keep the kernel from merging any.
        Case("2x3x7", {"batch": 2, "rows": 3, "N": 7}, torch.float32),
        case_of(6, 67, torch.float16),
        case_of(6, 67, torch.float16, approximate="tanh"),
        case_of(6, 67, torch.float64),
        case_of(6, 67, torch.float64, approximate="tanh"),
        case_of(1, 65_537, torch.bfloat16, up=None),
    ],
    cost=lambda case: cost_of(kernels[case.options.get("approximate", "none")], case),
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=partial(builds_of, list(kernels.values())),
    extremes=[
        Extreme(
            f"gates far from zero, {approximate}",
            case_of(4, 33, torch.float32, approximate=approximate),
            partial(saturated, name="gate"),
        )
        for approximate in kernels
    ],
)

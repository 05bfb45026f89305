"""SiLU (swish): an element times its own sigmoid.

    out = x · s, where s = 1 / (1 + exp(−x))          dx = dout · s · (1 + x · (1 − s))

Legend: N = last dimension, rows = everything before it.
Source: Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units for Neural Network Function
Approximation in Reinforcement Learning", 2017 (arXiv:1702.03118).
Limits: computed in fp32 (fp64 for fp64 inputs) and rounded once; nothing but x is saved; no
gradient of the gradient. Tensors are read where they lie; only where more than three dimensions
remain that do not merge are they copied.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.op import Case, Extreme, Op
from nearlight.core.pointwise import Config, tunable_config
from nearlight.ops._activation_record import (
    builds_of,
    case_of,
    check_x,
    cost_of,
    saturated,
    unary_inputs,
)
from nearlight.ops._activations import Unary

__all__ = ["OP", "Config", "config", "reference", "silu"]


def reference(x: torch.Tensor) -> torch.Tensor:
    """Compute SiLU as a plain PyTorch model does; arguments as in `silu`."""
    return F.silu(x)


config = tunable_config("silu")
kernels = Unary("silu", "silu", config)
_forward_op = kernels.register()


def silu(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Multiply each element with its sigmoid.

    out = x / (1 + exp(−x))

    Args:
        x: any shape and strides, fp16, bf16, fp32 or fp64, on CPU or CUDA.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape, dtype and order of memory of `x`.

    Raises:
        ValueError: an unknown backend.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118.

    Example:
        >>> import torch
        >>> from nearlight.ops import silu
        >>> silu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])
    """
    check_x("silu", x)
    return _forward_op(x) if use_triton(backend, x) else reference(x)


OP = Op(
    name="silu",
    function=silu,
    reference=reference,
    make_inputs=unary_inputs,
    cases=[case_of(16384, 14336), case_of(16384, 2880)],
    check_cases=[
        *(
            case_of(rows, width, dtype)
            for rows, width in ((1, 1), (9, 127))
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ),
        # Three dimensions, of which views keep the kernel from merging any.
        Case("2x3x7", {"batch": 2, "rows": 3, "N": 7}, torch.float32),
        case_of(66_001, 1, torch.float32),
        case_of(1, 65_537, torch.bfloat16),
    ],
    cost=partial(cost_of, kernels),
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: reference},
    builds=partial(builds_of, [kernels]),
    extremes=[
        Extreme("far from zero", case_of(4, 33, torch.float32), partial(saturated, name="x"))
    ],
)

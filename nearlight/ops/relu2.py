"""Squared ReLU: the activation of Primer and Nemotron.

    out = max(x, 0)²          dx = dout · 2 max(x, 0)

Legend: N = last dimension, rows = everything before it.
Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021
(arXiv:2109.08668).
Limits: computed in fp32 (fp64 for fp64 inputs) and rounded once; nothing but x is saved; no
gradient of the gradient. Tensors are read where they lie; only where more than three dimensions
remain that do not merge are they copied.
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
    check_x,
    cost_of,
    saturated,
    unary_inputs,
)
from nearlight.ops._activations import Unary

__all__ = ["OP", "Config", "config", "reference", "relu2"]


def reference(x: torch.Tensor) -> torch.Tensor:
    """Compute the squared ReLU as a plain PyTorch model does; arguments as in `relu2`."""
    return F.relu(x).square()


config = tunable_config("relu2")
kernels = Unary("relu2", "relu2", config)
_forward_op = kernels.register()


def relu2(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Square what is positive, and give 0 for the rest.

    out = max(x, 0)²

    Args:
        x: any shape and strides, fp16, bf16, fp32 or fp64, on CPU or CUDA.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape, dtype and order of memory of `x`.

    Raises:
        ValueError: an unknown backend.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: So et al. 2021, arXiv:2109.08668.

    Example:
        >>> import torch
        >>> from nearlight.ops import relu2
        >>> relu2(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    check_x("relu2", x)
    return _forward_op(x) if use_triton(backend, x) else reference(x)


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    def run(x: torch.Tensor) -> Any:
        return LigerReLUSquaredFunction.apply(x)

    return run


OP = Op(
    name="relu2",
    function=relu2,
    reference=reference,
    make_inputs=unary_inputs,
    cases=[case_of(16384, 14336), case_of(16384, 6144)],
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
    peers={"torch": lambda: reference, "liger": _liger_peer},
    builds=partial(builds_of, [kernels]),
    extremes=[
        Extreme("far from zero", case_of(4, 33, torch.float32), partial(saturated, name="x"))
    ],
)

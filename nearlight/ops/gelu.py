"""GELU: the activation of GPT-2, BERT and ViT.

    out = f(x)          dx = dout · f'(x)
    f(x) = x Φ(x), or with approximate="tanh" x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2

Legend: N = last dimension, rows = everything before it; Φ = distribution function of the normal
law.
Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (arXiv:1606.08415).
Limits: computed in fp32 (fp64 for fp64 inputs) and rounded once; nothing but x is saved; no
gradient of the gradient. Tensors are read where they lie; only where more than three dimensions
remain that do not merge are they copied.
"""

from __future__ import annotations

from functools import partial

import torch

from nearlight.core.backend import use_triton
from nearlight.core.op import Case, Extreme, Op
from nearlight.core.pointwise import Config, tunable_config
from nearlight.ops._activation_record import (
    builds_of,
    case_of,
    check_approximate,
    check_x,
    cost_of,
    gelu_reference,
    saturated,
    unary_inputs,
)
from nearlight.ops._activations import Unary

__all__ = ["OP", "Config", "config", "gelu", "reference"]


def reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute GELU as a plain PyTorch model does; arguments as in `gelu`."""
    return gelu_reference(x, approximate)


config = tunable_config("gelu")
kernels = {
    "none": Unary("gelu", "gelu", config),
    "tanh": Unary("gelu_tanh", "gelu_tanh", config),
}
_ops = {approximate: unary.register() for approximate, unary in kernels.items()}


def gelu(x: torch.Tensor, approximate: str = "none", *, backend: str = "auto") -> torch.Tensor:
    """Weigh each element with the normal law's distribution function at it.

    out = x · Φ(x)

    Args:
        x: any shape and strides, fp16, bf16, fp32 or fp64, on CPU or CUDA.
        approximate: "none", or "tanh" for the form of GPT-2 and Gemma.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape, dtype and order of memory of `x`.

    Raises:
        ValueError: an unknown approximation or backend.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Example:
        >>> import torch
        >>> from nearlight.ops import gelu
        >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])
    """
    check_x("gelu", x)
    check_approximate("gelu", approximate)
    return _ops[approximate](x) if use_triton(backend, x) else reference(x, approximate)


OP = Op(
    name="gelu",
    function=gelu,
    reference=reference,
    make_inputs=unary_inputs,
    cases=[
        case_of(16384, 14336),
        case_of(16384, 14336, approximate="tanh"),
        case_of(16384, 3584, approximate="tanh"),
    ],
    check_cases=[
        *(
            case_of(rows, width, dtype, approximate=approximate)
            for rows, width in ((1, 1), (9, 127))
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            for approximate in kernels
        ),
        # Three dimensions, of which views keep the kernel from merging any.
        Case("2x3x7", {"batch": 2, "rows": 3, "N": 7}, torch.float32),
        case_of(66_001, 1, torch.float32),
        case_of(1, 65_537, torch.bfloat16),
    ],
    cost=lambda case: cost_of(kernels[case.options.get("approximate", "none")], case),
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: reference},
    builds=partial(builds_of, list(kernels.values())),
    extremes=[
        Extreme(
            f"far from zero, {approximate}",
            case_of(4, 33, torch.float32, approximate=approximate),
            partial(saturated, name="x"),
        )
        for approximate in kernels
    ],
)

"""Softmax over the last dimension, scaled and masked in the same pass.

    y = exp(z − max z) / Σ exp(z − max z), z = scale · x + mask
    dx = scale · y · (dy − Σ y dy)

Legend: N = width of a row (last dimension), rows = everything before it.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018
(arXiv:1805.02867).
Limits: any width; sums in fp32 (fp64 for fp64 inputs); nothing but y is saved; no gradient of the
mask, and none of the gradient.
"""

from __future__ import annotations

import torch

from nearlight.core.backend import use_triton
from nearlight.core.tuned import tunable
from nearlight.ops import _softmax, _softmax_config, _softmax_record

__all__ = ["OP", "config", "reference", "softmax"]


def reference(
    x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the softmax as a plain PyTorch model does; arguments as in `softmax`."""
    return _softmax_record.reference(x, scale, mask, is_log=False)


config = tunable("softmax", _softmax_config.candidates)(_softmax_config.config)
_forward_op = _softmax.register("softmax", config, is_log=False)


def softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Turn each row of scores into probabilities.

    y = exp(z) / Σ exp(z) over the last dimension, with z = scale · x, masked.

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides, on CPU or CUDA.
        scale: factor of x.
        mask: bool (True keeps, False takes the element out, whatever x holds there) or a float
            that is added; broadcasts to x, any strides, same device; gets no gradient.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., N) in the dtype of x, contiguous; 0 where the mask is False or −inf, without a
        gradient, also where it takes out a whole row. The rest is PyTorch's, NaN included.

    Raises:
        ValueError: a shape, device or backend that is not allowed, or a mask with a gradient.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.

    Example:
        >>> import torch
        >>> from nearlight.ops import softmax
        >>> softmax(torch.zeros(3), mask=torch.tensor([True, True, False]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    _softmax_record.check("softmax", x, mask)
    if not use_triton(backend, x):
        return reference(x, scale=scale, mask=mask)
    y: torch.Tensor = _forward_op(x, mask, scale)
    return y


OP = _softmax_record.record(softmax, reference, config, is_log=False)

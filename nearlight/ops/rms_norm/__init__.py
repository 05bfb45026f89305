"""RMSNorm over the last dimension.

    y = x / sqrt(mean(x²) + eps) * (offset + weight)

Legend: N = width of a row (last dimension), rows = everything before it.
Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
Limits: N ≤ 262,144; sums in fp32 (fp64 for fp64 inputs); gradients without atomics, so equal in
every run; no gradient of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.op import Extreme, Inputs, Op
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.rows import MAX_WIDTH, accumulator, check_rows
from nearlight.ops._row_norm import RowNorm, case_of
from nearlight.ops.rms_norm import kernels
from nearlight.ops.rms_norm.kernels import config

__all__ = ["OP", "config", "reference", "rms_norm"]

CASTINGS = ("llama", "gemma", "none")
# Later versions of torch take `F.rms_norm` in fp32 under CUDA autocast; 2.11 leaves it alone.
_IS_WIDENED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """Compute RMSNorm in plain PyTorch, cast by cast as Hugging Face's models do."""
    if casting == "none":
        scale = None if weight is None else weight + offset
        return F.rms_norm(x, x.shape[-1:], scale, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "gemma":
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return (weight + offset) * normed.to(x.dtype)


norm = RowNorm(
    "rms_norm",
    config,
    (kernels._rms_norm_fwd_kernel, kernels._rms_norm_fwd_wide_kernel),
    (kernels._rms_norm_bwd_kernel, kernels._rms_norm_bwd_projection_kernel),
    parameters=("weight",),
    statistics=("rstd",),
    options={"eps": 1e-6, "offset": 0.0, "round": True},
    backward_options=("offset",),
    flops=(4, 9),
    shapes=((2**19, 128), (16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536)),
    forward_registers=64,
    fuses_short_rows=True,
)
_forward_op = norm.register()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Literal["llama", "gemma", "none"] = "llama",
    backend: str = "auto",
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it by a weight.

    y = x / sqrt(mean(x²) + eps) * (offset + weight), the mean over the last dimension.

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides, N ≤ 262,144, on CPU or CUDA.
        weight: (N,) of any of these dtypes, on the same device; None for no scale.
        eps: added to the mean square.
        offset: added to the weight (1.0 in Gemma, whose weights are stored around zero).
        casting: "llama" rounds the normalised row to x's dtype before the weight (the result has
            the dtype that both promote to), "gemma" rounds once at the end to x's dtype, "none"
            is `torch.nn.functional.rms_norm` (fp32 under CUDA autocast where torch's is).
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., N), contiguous.

    Raises:
        ValueError: shape, device, casting or backend that is not allowed.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> import torch
        >>> from nearlight.ops import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    check_rows("rms_norm", x, weight=weight)
    check_options("rms_norm", weight, offset, casting)
    if not use_triton(backend, x):
        return reference(x, weight, eps, offset=offset, casting=casting)
    y: torch.Tensor = _forward_op(x, weight, eps, offset, *roundings(x, weight, casting))[0]
    return y


def check_options(op: str, weight: torch.Tensor | None, offset: float, casting: str) -> None:
    """Raise ValueError for a casting that does not exist, or an offset of no weight."""
    if casting not in CASTINGS:
        raise ValueError(f"{op}: casting={casting!r}; allowed are {', '.join(CASTINGS)}")
    if offset and weight is None:
        raise ValueError(f"{op}: offset={offset} without a weight; pass the weight")


def roundings(
    x: torch.Tensor, weight: torch.Tensor | None, casting: str
) -> tuple[bool, torch.dtype]:
    """Return whether the row is rounded to x's dtype before the weight, and the result's dtype."""
    if casting == "llama" and weight is not None:
        return x.dtype.itemsize == 2, torch.promote_types(x.dtype, weight.dtype)
    if casting == "none" and _IS_WIDENED and x.is_cuda and torch.is_autocast_enabled("cuda"):
        return False, accumulator(x.dtype)
    return False, x.dtype


def _zero_first_row(inputs: Inputs) -> Inputs:
    return _with_first_row(inputs, 0.0)


def _flatten_first_row(inputs: Inputs) -> Inputs:
    return _with_first_row(inputs, 3e4)


def _with_first_row(inputs: Inputs, value: float) -> Inputs:
    x = inputs["x"].detach().clone()
    x[0] = value
    return {**inputs, "x": x.requires_grad_()}


def _torch_peer() -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, **options: Any) -> Any:
        offset = options.get("offset", 0.0)
        return F.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, eps)

    return run


def _liger_peer() -> Callable[..., torch.Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def run(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, **options: Any) -> Any:
        offset, casting = options.get("offset", 0.0), options.get("casting", "llama")
        # Not in place: the peer may not overwrite the upstream gradient that it is timed with.
        return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)

    return run


_WIDTHS = (1, 7, 64, 127, 128, 129, 576)

OP = Op(
    name="rms_norm",
    function=rms_norm,
    reference=reference,
    make_inputs=norm.make_inputs,
    cases=[
        case_of(16384, 1024),
        case_of(16384, 4096),
        case_of(16384, 8192),
        case_of(4096, 16384),
        case_of(4096, 65536),
        case_of(2**19, 128),  # heads of 128, as Qwen3 normalises its queries and keys
    ],
    check_cases=[
        *(case_of(5, width, torch.float32) for width in _WIDTHS),
        *(case_of(3, 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        *(
            case_of(9, 65, dtype, casting=casting)
            for casting in CASTINGS
            for dtype in (torch.bfloat16, torch.float32)
        ),
        case_of(9, 65, torch.bfloat16, casting="gemma", offset=1.0),
        case_of(9, 65, torch.bfloat16, casting="llama", offset=1.0),
        case_of(9, 65, torch.bfloat16, weight=None),
        case_of(4097, 64, torch.float32),
        case_of(1, MAX_BLOCK + 1, torch.float32),
        case_of(2, 70_000, torch.bfloat16),
        case_of(1, MAX_WIDTH, torch.float32),
    ],
    large_cases=[case_of(600_000, 4096)],
    cost=norm.cost_of,
    extra_bytes=norm.extra_bytes_of,
    peers={"torch": _torch_peer, "liger": _liger_peer},
    builds=norm.builds,
    extremes=[
        Extreme("rows of zeros", case_of(3, 65, torch.float32), _zero_first_row),
        Extreme("a row of one value", case_of(3, 64, torch.float32), _flatten_first_row),
    ],
)

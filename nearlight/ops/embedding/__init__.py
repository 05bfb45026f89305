"""Rows of a table by their indices, with a gradient that is the same in every run.

    out[t] = scale · weight[indices[t]]          dweight[v] = scale · Σ dout[t] over indices[t] = v

Legend: T tokens (all dimensions of the indices), V rows of the table, D their width.

The backward sorts the tokens by index. Of the sorted list it first sums the pieces of fixed length
that hold one index only; then each row adds the tokens before its first such piece, the pieces,
and the tokens after them. So an index that fills the whole batch adds some 3·√T rows one after
another and not T, always in the same order, and no gradient is added by atomics.

Limits: sums in fp32 (fp64 for fp64); the gradient is dense; no gradient of the gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Extreme, Inputs, KernelBuild, Op, normal
from nearlight.core.rows import FLOATS, refuse_dtensor
from nearlight.ops.embedding.kernels import config, gather, sum_rows
from nearlight.ops.embedding.registration import (
    backward_cost,
    check_indices,
    forward_cost,
    forward_op,
    workspace_bytes,
)

__all__ = ["OP", "config", "embedding", "reference"]


def reference(
    indices: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Look rows up in plain PyTorch; arguments as in `embedding`."""
    if weight.shape[1] == 0:  # the gradient of F.embedding reads from address 0 there, on CUDA
        return weight.sum(0).expand(*indices.shape, 0)
    rows = F.embedding(indices, weight, padding_idx)
    return rows if scale == 1.0 else rows * scale


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """Look up the rows of a table.

    out[...] = scale · weight[indices[...]]

    Args:
        indices: (...) int64 or int32, any strides, in [0, V), on the device of the table.
        weight: (V, D) fp16, bf16, fp32 or fp64, any strides, on CPU or CUDA.
        padding_idx: a row whose gradient is 0, negative from the end; None for none.
        scale: factor of the rows, rounded once with them (Gemma: sqrt(D)).
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        (..., D) in the dtype of `weight`, contiguous.

    Raises:
        ValueError: shapes, devices, padding_idx or backend that are not allowed; an index outside
            on a CPU (on CUDA a RuntimeError when the device gets there).
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: torch.nn.functional.embedding.

    Example:
        >>> import torch
        >>> from nearlight.ops import embedding
        >>> embedding(torch.tensor([2, 0]), torch.tensor([[1.0], [2.0], [3.0]]), scale=2.0)
        tensor([[6.],
                [2.]])
    """
    refuse_dtensor("embedding", indices, weight)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: indices are {indices.dtype}; use indices.long()")
    if weight.dtype not in FLOATS:
        raise TypeError(f"embedding: weight is {weight.dtype}; allowed are fp16, bf16, fp32, fp64")
    if weight.ndim != 2 or weight.device != indices.device:
        raise ValueError(
            f"embedding: weight has shape {tuple(weight.shape)} on {weight.device}; allowed is "
            f"(V, D) on {indices.device}, where the indices are"
        )
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(
            f"embedding: padding_idx={padding_idx}; the table of {rows} rows allows "
            f"{-rows} to {rows - 1}, or None"
        )
    if not use_triton(backend, weight):
        if type(indices) is torch.Tensor and indices.is_cpu and not torch.compiler.is_compiling():
            check_indices(indices, rows)
        return reference(indices, weight, padding_idx=padding_idx, scale=scale)
    return forward_op(indices, weight, scale, -1 if padding_idx is None else padding_idx % rows)


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Indices as of words: a few are frequent, most are rare, and the last row is the last's."""
    tokens, rows, width = (case.shape[name] for name in ("T", "V", "D"))
    if tokens and not rows:
        raise ValueError("no index is one of a table without rows")
    place = generator.device
    uniform = torch.rand(tokens, generator=generator, device=place)
    indices = (uniform**3 * rows).long().clamp(max=rows - 1)
    indices[-1:] = rows - 1
    weight = normal(case, device, generator, rows, width).to(case.dtype)
    # The truth of a larger gradient, in fp64, takes more memory than others leave on a GPU.
    weight.requires_grad_(rows * width <= 2**31)
    return {"indices": indices.to(device), "weight": weight, **case.options}


def _meta(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, rows, width = (case.shape[name] for name in ("T", "V", "D"))
    with torch.device("meta"):
        indices, weight = torch.empty(tokens, dtype=torch.int64), torch.empty(rows, width)
        return indices, weight.to(case.dtype), torch.empty(tokens, width, dtype=case.dtype)


def _distinct_rows(case: Case) -> int:
    """Return how many rows the indices of a case are expected to name."""
    tokens, rows = case.shape["T"], case.shape["V"]
    edges = torch.linspace(0, 1, rows + 1, dtype=torch.float64) ** (1 / 3)
    return int((1 - (1 - edges.diff()) ** tokens).sum())


def _cost(case: Case) -> dict[str, Cost]:
    indices, weight, out = _meta(case)
    # A row that several tokens name need be read once alone.
    there = forward_cost((indices, weight[: _distinct_rows(case)]), {}, out)
    return {
        "forward": there,
        "forward_backward": there + backward_cost((out, indices), {}, weight),
    }


def _extra_bytes(case: Case) -> int:
    return workspace_bytes(case.shape["T"], case.shape["V"], case.shape["D"], case.dtype)


def _builds(arch: str) -> list[KernelBuild]:
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        for dtype, width, scale in (
            (half, 4096, 1.0),
            (half, 2880, 64.0),
            (torch.float32, 4096, 1.0),
            (torch.float32, 1, 1.0),
        ):
            indices, weight, out = _meta(Case("", {"T": 16384, "V": 32000, "D": width}, dtype))
            gather(out, indices, weight, torch.empty((), dtype=torch.int32), scale)
            keys, bounds = indices.int(), torch.empty(32001, dtype=torch.int64)
            sum_rows(weight, out, keys, indices, bounds, scale, -1)
    return [replace(build, max_registers=128) for build in builds]


def _one_index(inputs: Inputs) -> Inputs:
    indices = inputs["indices"].clone()
    indices[::2] = 1
    return {**inputs, "indices": indices}


def _outside(inputs: Inputs) -> Inputs:
    indices = inputs["indices"].clone()
    indices[-1] = inputs["weight"].shape[0]
    return {**inputs, "indices": indices}


def _case(
    tokens: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: float
) -> Case:
    words = [f"T{tokens} V{rows} D{width}", *(f"{k}={v}" for k, v in options.items())]
    return Case(" ".join(words), {"T": tokens, "V": rows, "D": width}, dtype, options)


OP = Op(
    name="embedding",
    function=embedding,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[
        _case(16384, 32000, 4096),
        _case(16384, 128256, 4096),
        _case(32768, 151936, 2048),
        _case(16384, 50257, 2880),
        _case(16384, 262144, 5120, scale=71.5),
    ],
    check_cases=[
        *(
            _case(tokens, rows, width, dtype)
            for tokens, rows, width in ((1, 1, 1), (7, 5, 33), (70, 3, 17))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(_case(40, 9, 20, dtype) for dtype in (torch.float16, torch.float64)),
        _case(37, 6, 24, torch.float32, scale=3.3),
        _case(37, 6, 24, torch.bfloat16, scale=3.3, padding_idx=1),
        _case(37, 6, 24, torch.float32, padding_idx=-6),
        _case(66_001, 2, 1, torch.float32),
        _case(3, 66_001, 1, torch.float32),
        _case(2, 3, 65_537, torch.bfloat16),
    ],
    large_cases=[_case(2**19 + 8, 1000, 4096), _case(1000, 2**19 + 8, 4096)],
    cost=_cost,
    extra_bytes=_extra_bytes,
    peers={"torch": lambda: reference},
    builds=_builds,
    extremes=[
        Extreme("half of the tokens are one", _case(300, 4, 5, torch.float32), _one_index),
        Extreme("an index outside", _case(5, 4, 3, torch.float32), _outside, raises=ValueError),
    ],
)

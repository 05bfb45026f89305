"""Dropout and the residual that follows it, in one pass and without a stored mask.

    out = residual + x · keep / (1 − p)          dx = dout · keep / (1 − p)      dresidual = dout

Legend: N = last dimension, rows = everything before it.
Source: Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), section 5.4.
Limits: those of `dropout`; computed in fp32 (fp64 for fp64) and rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from nearlight.core.backend import use_triton
from nearlight.core.cost import Cost, formula_for
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.op import Case, Inputs, KernelBuild, Op
from nearlight.core.pointwise import Config, tunable_config
from nearlight.ops._activation_record import rows_of
from nearlight.ops._dropout import Dropout, check, draw_seed, plain_dropout
from nearlight.ops.dropout import case_of, dropout_op, make_seed

__all__ = ["OP", "Config", "config", "dropout_add", "reference"]


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute it in plain PyTorch with the same mask; arguments as in `dropout_add`."""
    return residual + (plain_dropout(x, p, seed) if training and p else x)


config = tunable_config("dropout_add")
kernels = Dropout("dropout_add", config)
_forward_op = kernels.register_add(dropout_op)


def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Drop random elements of a branch and add it to the residual.

    out = residual + x · keep / (1 − p), each element kept with probability 1 − p

    Args:
        x: any shape and strides, fp16, bf16, fp32 or fp64, on CPU or CUDA.
        residual: the shape and device of `x`, any of these dtypes.
        p: share that is dropped, 0 to 1.
        training: False adds all of x, as p = 0 does.
        seed: as in `dropout`, which draws the same mask for the same seed.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape of `x` in the dtype that both promote to; the order of memory as in `dropout`.

    Raises:
        ValueError: shapes or devices that differ, p outside [0, 1], a seed that does not fit, or
            an unknown backend.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Example:
        >>> import torch
        >>> from nearlight.ops import dropout_add
        >>> dropout_add(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), 1.0)
        tensor([1., 2., 3.])
    """
    check("dropout_add", p, seed, x=x, residual=residual)
    if not training or p == 0.0 or not use_triton(backend, x):
        return reference(x, residual, p, training=training, seed=seed)
    return _forward_op(x, residual, draw_seed(x) if seed is None else seed, p)


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    x = rows_of(case, device, generator).requires_grad_()
    residual = rows_of(case, device, generator, (1.0, 30.0, 1e-3, 1.0), (0.0, 0.0, 0.0, 100.0))
    seed = make_seed(device, generator)
    return {"x": x, "residual": residual.requires_grad_(), "seed": seed, **case.options}


def _cost(case: Case) -> dict[str, Cost]:
    x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
    there, back = formula_for("nearlight::dropout_add_fwd"), formula_for("nearlight::dropout_fwd")
    assert there and back
    forward = there((x, x), {}, x)
    return {"forward": forward, "forward_backward": forward + back((x,), {}, x)}


def _builds(arch: str) -> list[KernelBuild]:
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        seed = torch.empty(2, dtype=torch.int64)
        for dtype, residual_dtype in ((half, half), (half, torch.float32)):
            x = torch.empty(16384, 4096, dtype=dtype)
            kernels.add(x, x.to(residual_dtype), seed, 0.1)
    return [replace(build, max_registers=64) for build in builds]


OP = Op(
    name="dropout_add",
    function=dropout_add,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[case_of(16384, 4096, 0.1), case_of(16384, 8192, 0.1), case_of(16384, 2880, 0.1)],
    check_cases=[
        *(
            case_of(rows, width, p, dtype)
            for rows, width, p in ((9, 127, 0.1), (1, 1, 0.5), (6, 64, 1.0))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        case_of(5, 66, 0.9, torch.float16),
        case_of(5, 66, 0.9, torch.float64),
    ],
    cost=_cost,
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: lambda x, residual, p, seed: residual + F.dropout(x, p)},
    builds=_builds,
)

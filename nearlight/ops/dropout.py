"""Dropout without a stored mask.

    out = x · keep / (1 − p)          dx = dout · keep / (1 − p)

Legend: N = last dimension, rows = everything before it.
Source: Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov, "Dropout: A Simple Way to
Prevent Neural Networks from Overfitting", 2014; Philox 4x32-10 draws the mask.
Limits: p is exact to 2⁻³³, and another p compiles another kernel; where x does not lie in its
logical order, four times as many words are drawn; a dropped NaN or infinity gives NaN, as in
PyTorch.
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

__all__ = ["OP", "Config", "config", "dropout", "reference"]


def reference(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute dropout in plain PyTorch with the same mask; arguments as in `dropout`."""
    return plain_dropout(x, p, seed) if training and p else x


config = tunable_config("dropout")
kernels = Dropout("dropout", config)
dropout_op = kernels.register()


def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Set random elements to zero and scale the others such that the mean stays.

    out = x · keep / (1 − p), each element kept with probability 1 − p

    Args:
        x: any shape and strides, fp16, bf16, fp32 or fp64, on CPU or CUDA.
        p: share that is dropped, 0 to 1.
        training: False returns x itself, as p = 0 does.
        seed: (2,) int64 on x's device, a seed and an offset; equal ones give equal masks on every
            backend and in any layout. None draws both from the default generator of the device,
            so `torch.manual_seed`, CUDA graphs and checkpointing do as they do with PyTorch's.
        backend: "auto" (Triton on CUDA, plain PyTorch on CPU), "triton" or "reference".

    Returns:
        The shape and dtype of `x`, in its order of memory up to three dimensions, contiguous or
        channels last; else contiguous.

    Raises:
        ValueError: p outside [0, 1], a seed that does not fit, or an unknown backend.
        TypeError: a dtype that is not allowed, or a DTensor.

    Source: Srivastava et al. 2014.

    Example:
        >>> import torch
        >>> from nearlight.ops import dropout
        >>> dropout(torch.ones(8), 0.5, seed=torch.tensor([0, 0]))
        tensor([0., 2., 2., 2., 2., 0., 2., 0.])
    """
    check("dropout", p, seed, x=x)
    if not use_triton(backend, x):
        return reference(x, p, training=training, seed=seed)
    if not training or p == 0.0:
        return x
    return dropout_op(x, draw_seed(x) if seed is None else seed, p, x.dtype)


def make_seed(device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return a random seed and offset for a case."""
    place = generator.device
    return torch.randint(2**62, (2,), generator=generator, device=place).to(device)


def case_of(rows: int, width: int, p: float, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Return a case named by its rows, width and p."""
    return Case(f"{rows}x{width} p={p}", {"rows": rows, "N": width}, dtype, {"p": p})


def _make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    x = rows_of(case, device, generator).requires_grad_()
    return {"x": x, "seed": make_seed(device, generator), **case.options}


def _cost(case: Case) -> dict[str, Cost]:
    x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
    formula = formula_for("nearlight::dropout_fwd")
    assert formula
    once = formula((x,), {}, x)
    return {"forward": once, "forward_backward": once + once}


def _builds(arch: str) -> list[KernelBuild]:
    half = torch.float16 if arch == "sm_75" else torch.bfloat16
    with described_launches(gpu_of_arch(arch)) as builds, torch.device("meta"):
        seed = torch.empty(2, dtype=torch.int64)
        for dtype in (half, torch.float32):
            kernels.apply(torch.empty(16384, 14336, dtype=dtype), seed, 0.1, dtype)
        kernels.apply(torch.empty(14336, 16384, dtype=half).T, seed, 0.1, half)
    return [replace(build, max_registers=64) for build in builds]


OP = Op(
    name="dropout",
    function=dropout,
    reference=reference,
    make_inputs=_make_inputs,
    cases=[case_of(16384, 4096, 0.1), case_of(16384, 14336, 0.1), case_of(16384, 2880, 0.5)],
    check_cases=[
        *(
            case_of(rows, width, p, dtype)
            for rows, width, p in ((9, 127, 0.1), (1, 1, 0.5), (6, 64, 1.0))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        case_of(5, 66, 0.9, torch.float16),
        case_of(5, 66, 0.9, torch.float64),
        case_of(66_001, 1, 0.3, torch.float32),
        case_of(1, 65_537, 0.3, torch.bfloat16),
    ],
    cost=_cost,
    extra_bytes=lambda case: 0,
    peers={"torch": lambda: lambda x, p, seed: F.dropout(x, p)},
    builds=_builds,
)

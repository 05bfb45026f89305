"""Flops by pipe and bytes of a call: one formula per op, and the limit that follows from them.

Formulas are registered by the qualified name of a torch op ("aten::mm", "nearlight::rms_norm_fwd");
ops register their own, the profiler registers aten's. This is where the two rooms meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from nearlight.core.hardware import Gpu

Pattern = Literal["stream", "matmul", "attention"]

# The pipe that a matrix product of a dtype runs on; fp32 leaves it only when TF32 is allowed.
MATMUL_PIPE = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}


@dataclass(frozen=True)
class Attention:
    """The shape of an attention call that decides which measured curve it is judged by.

    Attributes:
        head_dim: width of a head.
        seq_len: number of keys a query sees.
        is_causal: whether the kernel skips the masked half (its flops count half then).
        is_backward: whether it is the backward pass.
    """

    head_dim: int
    seq_len: int
    is_causal: bool
    is_backward: bool


@dataclass(frozen=True)
class Cost:
    """What a call must do at least, and how it does it.

    Attributes:
        flops: operations by pipe (a key of `Gpu.peaks_tflops`); a multiply-add counts two.
        bytes_read: fewest bytes read from device memory, each input once.
        bytes_written: fewest bytes written, each output once.
        num_kernels: device launches of the call (0 for views).
        workspace_bytes: device memory that lives only during the call.
        pattern: which ceiling the call is judged by.
        attention: for the pattern "attention", which of its curves; None takes their median.
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    num_kernels: int = 1
    workspace_bytes: int = 0
    pattern: Pattern = "stream"
    attention: Attention | None = None

    @property
    def bytes(self) -> int:
        """Fewest bytes moved, read plus written."""
        return self.bytes_read + self.bytes_written

    @property
    def total_flops(self) -> int:
        """Operations of all pipes together."""
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both calls, one after the other."""
        pipes = self.flops.keys() | other.flops.keys()
        return Cost(
            flops={pipe: self.flops.get(pipe, 0) + other.flops.get(pipe, 0) for pipe in pipes},
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            num_kernels=self.num_kernels + other.num_kernels,
            workspace_bytes=max(self.workspace_bytes, other.workspace_bytes),
            pattern=self.pattern,
        )

    def limit_s(self, gpu: Gpu) -> float:
        """Return the limit: the slower of flops over dense peaks and bytes over bandwidth.

        Different pipes can work at once, so the flop term is the slowest pipe, not their sum.
        """
        return max(self.flops_s(gpu), self.bytes_s(gpu))

    def flops_s(self, gpu: Gpu) -> float:
        """Return the part of the limit that comes from flops alone."""
        return max(
            (flops / (gpu.peak_tflops(pipe) * 1e12) for pipe, flops in self.flops.items() if flops),
            default=0.0,
        )

    def bytes_s(self, gpu: Gpu) -> float:
        """Return the part of the limit that comes from bytes alone."""
        return self.bytes / (gpu.memory_gbps * 1e9)

    def bound(self, gpu: Gpu) -> Literal["memory", "compute"]:
        """Return which of the two terms sets the limit."""
        return "memory" if self.bytes_s(gpu) >= self.flops_s(gpu) else "compute"


Formula = Callable[[tuple[Any, ...], Mapping[str, Any], Any], Cost]
_formulas: dict[str, Formula] = {}


def register_cost(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula `(args, kwargs, outputs) -> Cost` for one or several torch ops."""

    def decorate(formula: Formula) -> Formula:
        for name in names:
            _formulas[name] = formula
        return formula

    return decorate


def formula_for(name: str) -> Formula | None:
    """Return the formula registered for "namespace::op", or None."""
    return _formulas.get(name)


def matmul_pipe(dtype: torch.dtype, allow_tf32: bool = False) -> str:
    """Return the pipe on which a matrix product of `dtype` runs."""
    if dtype == torch.float32 and allow_tf32:
        return "tf32"
    return MATMUL_PIPE.get(dtype, "fp32")


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the distinct bytes a tensor covers; an expanded dimension is stored once."""
    sizes = (
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0
    )
    return 0 if tensor.numel() == 0 else prod(sizes) * tensor.element_size()

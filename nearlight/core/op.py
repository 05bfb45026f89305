"""The Op record: everything the proof, the benchmark and the profiler need to know of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from nearlight.core.cost import Cost
from nearlight.core.errors import BadInput

Inputs = dict[str, Any]
NUM_WARPS = (1, 2, 4, 8, 16, 32)  # of a Triton program: a block ends at 1,024 threads


@dataclass(frozen=True)
class Case:
    """One shape, dtype and options of an op.

    Attributes:
        name: how tables call it ("16384x4096").
        shape: sizes by the names of the op file's legend.
        dtype: dtype of the main inputs.
        options: keyword arguments of the public function beyond its tensors.
    """

    name: str
    shape: Mapping[str, int]
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)


def normal(
    case: Case, device: torch.device, generator: torch.Generator, *size: int
) -> torch.Tensor:
    """Draw normal values for a case's `make_inputs`, on the device.

    They are fp32, of an fp64 case fp64: drawn in fp32, they would hide what a kernel rounds to it.
    """
    wide = torch.promote_types(case.dtype, torch.float32)
    place = device if device.type == "meta" else generator.device
    return torch.randn(*size, generator=generator, device=place, dtype=wide).to(device)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class KernelBuild:
    """One kernel as it is compiled for an arch, with the budget its machine code must keep.

    Attributes:
        kernel: a function made by `nearlight.core.triton.jit`, or a `nearlight.core.cuda.Kernel`.
        signature: argument name to Triton type ("*bf16", "i64"), constants left out; "i64:16" is
            a multiple of 16, "*bf16:1" a pointer that is not aligned to 16 bytes as others are.
            Empty for CUDA C++, whose source says it.
        constants: compile-time constants by name; empty for CUDA C++.
        num_warps: warps of a Triton program.
        num_stages: depth of Triton's software pipeline.
        enable_fp_fusion: whether Triton may make one instruction, with one rounding, of a product
            and a sum.
        max_registers: registers per thread allowed.
        max_spill_bytes: bytes of spill stores plus loads allowed.
        uses_tensor_cores: whether the machine code must contain matrix instructions.
        num_threads: threads of a CUDA C++ block; 0 where nothing is known of its launch.
        shared_bytes: dynamic shared memory of a CUDA C++ block.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True
    max_registers: int = 255
    max_spill_bytes: int = 0
    uses_tensor_cores: bool = False
    num_threads: int = 0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise BadInput where Triton has no such launch option; it asserts, or takes it so."""
        warps, stages, fusion = self.num_warps, self.num_stages, self.enable_fp_fusion
        wrong = ""
        if not _is_count(warps) or warps not in NUM_WARPS:
            wrong = f"num_warps={warps!r}: allowed are {', '.join(map(str, NUM_WARPS))}"
        elif not _is_count(stages) or stages < 0:
            wrong = f"num_stages={stages!r}: allowed are whole numbers from 0"
        elif not isinstance(fusion, bool):
            wrong = f"enable_fp_fusion={fusion!r}: allowed are True and False"
        if wrong:
            kernel = getattr(self.kernel, "__name__", "")
            raise BadInput(f"{kernel}: {wrong}" if kernel else wrong)

    @property
    def name(self) -> str:
        """The kernel as its source calls it, with template arguments."""
        return str(getattr(self.kernel, "name", None) or self.kernel.__name__)


@dataclass(frozen=True)
class Extreme:
    """An input at the edge of what an op takes, proved against the reference like any other.

    Attributes:
        name: what is extreme about it ("all rows ignored", "label out of range").
        case: the shape, dtype and options it is made from.
        change: edits the inputs of the case and returns them; it may replace tensors, not write
            into them.
        raises: the error that is the right answer; None where the reference gives the answer.
        is_finite: whether every output and gradient must be finite.
    """

    name: str
    case: Case
    change: Callable[[Inputs], Inputs]
    raises: type[Exception] | None = None
    is_finite: bool = True


@dataclass(frozen=True)
class Op:
    """An op of nearlight or of a user.

    Attributes:
        name: file, function and table name.
        function: the public function, called as `function(**inputs)`.
        reference: plain torch, called the same way without `backend`; differentiable; computes
            in fp64 when the inputs are fp64 and as a plain PyTorch model would otherwise.
        make_inputs: `(case, device, generator) -> Inputs` with seeded random tensors, or lists of
            them; floating tensors that `function` can differentiate have `requires_grad`.
        cases: what is measured on a GPU.
        check_cases: small shapes that every tile edge, option and dtype is proved on.
        cost: `(case) -> {"forward": Cost, "forward_backward": Cost}` with fewest bytes.
        extra_bytes: `(case) -> int`, declared peak of device memory beyond the inputs, the
            outputs and the returned gradients, for forward and backward together.
        large_cases: shapes past 2³¹ elements whose first tensor's rows do not depend on each
            other; proved on a GPU.
        peers: name to a factory; the factory imports the peer and returns a function called as
            `function(**inputs)`, or raises ImportError.
        builds: `(arch) -> kernels to compile` for "sm_80" and later, as the op launches them:
            `nearlight.core.launch.described_launches` writes them down.
        extremes: inputs at the edge beyond the empty ones, which every op is proved on.
        refused_layouts: input name to the layout families that may be refused by a ValueError
            or TypeError naming it ("transposed", "sliced", "strided", "expanded", "offset").
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    make_inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    cases: Sequence[Case]
    check_cases: Sequence[Case]
    cost: Callable[[Case], Mapping[str, Cost]]
    extra_bytes: Callable[[Case], int]
    large_cases: Sequence[Case] = ()
    peers: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    builds: Callable[[str], Sequence[KernelBuild]] = lambda arch: ()
    extremes: Sequence[Extreme] = ()
    refused_layouts: Mapping[str, Sequence[str]] = field(default_factory=dict)

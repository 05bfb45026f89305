"""Norms of a residual stream: the sum of a block's output and the stream, and its norm, at once.

    total = residual + x        y = norm(total)        dx = dresidual = dnorm(dy) + dtotal

The norm's own kernels add: four passes over the rows instead of five, and backward four instead of
six, for the sum is normalised while it is written, and its two gradients are added where they
arise. The stream may be fp32 beside half-precision blocks; each gradient is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.hardware import Gpu, find_gpu
from nearlight.core.launch import described_launches, gpu_of_arch, launch_gpu
from nearlight.core.op import Case, Inputs, KernelBuild
from nearlight.core.register import register_op
from nearlight.core.row_config import (
    MAX_BLOCK,
    RowConfig,
    backward_candidates,
    backward_config,
    forward_candidates,
    forward_config,
)
from nearlight.core.rows import (
    FEW_COLUMNS,
    accumulator,
    accumulator_pipe,
    refuse_dtensor,
    row_backward,
    row_forward,
    row_shape,
    with_budgets,
)
from nearlight.core.tuned import tunable

WIDE = {"residual_dtype": torch.float32}  # an option of cases


def check_residual(op: str, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raise unless `residual` is as `x`, or fp32 beside a half-precision one."""
    refuse_dtensor(op, residual)
    if residual.dtype != x.dtype and (residual.dtype, x.dtype.itemsize) != (torch.float32, 2):
        raise TypeError(
            f"{op}: residual is {residual.dtype} and x {x.dtype}; allowed is the dtype of x, or "
            "fp32 beside fp16 or bf16"
        )
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"{op}: residual has shape {tuple(residual.shape)} on {residual.device} and x "
            f"{tuple(x.shape)} on {x.device}; they must agree"
        )


def tunable_config(op: str, num_sums: int) -> Callable[..., RowConfig]:
    """Return the launch rule of an op that sums the gradients of so many parameters."""

    def candidates(
        shape: tuple[int, int],
        dtype: torch.dtype,
        gpu: Gpu | None,
        direction: Literal["forward", "backward"],
    ) -> dict[RowConfig, str]:
        if direction == "forward":
            return forward_candidates(shape, gpu)
        return backward_candidates(shape, dtype, gpu, num_sums, num_upstream=2)

    @tunable(op, candidates)
    def config(
        shape: tuple[int, int],
        dtype: torch.dtype,
        gpu: Gpu | None,
        direction: Literal["forward", "backward"] = "forward",
    ) -> RowConfig:
        """Choose the launch for (rows, N) on a GPU, or for the interpreter: `gpu` is None."""
        if direction == "forward":  # of two wide rows registers hold half as much of each
            return forward_config(shape, gpu, wide_block=MAX_BLOCK // 4)
        return backward_config(shape, dtype, gpu, num_sums, num_upstream=2)

    return config


@dataclass(frozen=True)
class ResidualNorm:
    """The norm of a residual stream as torch ops.

    Attributes:
        name: of the op.
        config: its launch rule.
        forward_kernels: of the norm, for rows that fit into a tile and for wider ones.
        backward_kernels: of the norm, the pass itself and the one before it over wide rows.
        parameters: names of (N,) tensors, the weight first.
        statistics: names of what the backward needs of each row.
        options: compile-time constants of the forward, by name, with values of common use.
        backward_options: names of those that the backward takes, too.
        flops: operations per element, forward and backward.
    """

    name: str
    config: Callable[..., RowConfig]
    forward_kernels: tuple[Any, Any]
    backward_kernels: tuple[Any, Any]
    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    options: Mapping[str, float | bool]
    backward_options: tuple[str, ...]
    flops: tuple[int, int]

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return y, the sum, and each statistic, (...) in accumulator dtype.

        Args:
            x: (..., N).
            residual: (..., N).
            rest: the parameters or None, the options, the dtype of y.
        """
        outputs = y, total, *statistics = self._forward_fake(x, residual, *rest)
        count = len(self.parameters)
        if x.numel() == 0:
            return y, total, *(statistic.zero_() for statistic in statistics)
        constants = {n.upper(): v for n, v in zip(self.options, rest[count:-1], strict=True)}
        chosen = self.config(row_shape(x), x.dtype, launch_gpu(x.device))
        written = [y, *statistics]
        row_forward(
            self.forward_kernels, chosen, x, rest[:count], written, residual, total, **constants
        )
        return outputs

    def _forward_fake(
        self, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        y = x.new_empty(x.shape, dtype=rest[-1])
        per_row = (x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype)) for _ in self.statistics)
        return y, residual.new_empty(x.shape), *per_row

    def backward(
        self, dy: torch.Tensor, dtotal: torch.Tensor | None, total: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of x, residual and parameters; one not needed has no elements.

        Of x and a residual of its dtype both gradients are one, and the second has no elements.

        Args:
            dy: (..., N).
            dtotal: (..., N) or None, what else flows into the sum.
            total: (..., N), the sum.
            rest: the parameters or None, the statistics, the options, the dtype of x, and which
                gradients are needed.
        """
        dx, dresidual, *others = gradients = self._backward_fake(dy, dtotal, total, *rest)
        if total.numel() == 0:
            return dx, dresidual, *(gradient.zero_() for gradient in others)
        first, second, *_ = *(g for g in (dx, dresidual) if g.numel()), None, None
        sums = [g if is_needed else None for g, is_needed in zip(others, rest[-1][2:], strict=True)]
        values = rest[-2 - len(self.backward_options) : -2]
        constants = {n.upper(): v for n, v in zip(self.backward_options, values, strict=True)}
        constants["enable_fp_fusion"] = total.shape[-1] > FEW_COLUMNS
        chosen = self.config(row_shape(total), total.dtype, launch_gpu(total.device), "backward")
        tensors = dy, total, rest[0], self._statistics(rest), first, sums, dtotal, second
        row_backward(self.backward_kernels, chosen, *tensors, **constants)
        return gradients

    def _statistics(self, rest: Sequence[Any]) -> Sequence[torch.Tensor]:
        return rest[len(self.parameters) : len(self.parameters) + len(self.statistics)]

    def _backward_fake(
        self, dy: torch.Tensor, dtotal: torch.Tensor | None, total: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        *_, dtype, needs = rest
        is_one = dtype == total.dtype
        needs_dx, needs_dresidual = (any(needs[:2]), False) if is_one else needs[:2]
        return (
            total.new_empty(total.shape if needs_dx else (0,), dtype=dtype),
            total.new_empty(total.shape if needs_dresidual else (0,)),
            *(
                (total if parameter is None else parameter).new_empty(
                    total.shape[-1:] if is_needed else (0,)
                )
                for parameter, is_needed in zip(rest, needs[2:], strict=False)
            ),
        )

    def register(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Define the torch ops and return the forward's."""
        options = {n: f"{type(v).__name__} {n}" for n, v in self.options.items()}
        parameters = [f"Tensor? {name}" for name in self.parameters]
        dtype = "ScalarType dtype"

        def schema(end: str, arguments: Sequence[str], num_outputs: int) -> str:
            outputs = ", ".join(["Tensor"] * num_outputs)
            return f"{self.name}_{end}({', '.join(arguments)}) -> ({outputs})"

        statistics = [f"Tensor {name}" for name in self.statistics]
        passed = [options[name] for name in self.backward_options]
        rest = [*parameters, *statistics, *passed, dtype, "bool[] needs"]
        backward_op = register_op(
            schema(
                "bwd",
                ["Tensor dy", "Tensor? dtotal", "Tensor total", *rest],
                2 + len(parameters),
            ),
            self.backward,
            fake=self._backward_fake,
            cost=self.backward_cost,
        )

        def differentiate(
            ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None, *_: None
        ) -> tuple[Any, ...]:
            needs = list(ctx.needs_input_grad[: 2 + len(parameters)])
            saved = ctx.saved_tensors
            gradients = [dtotal, dtotal] + [None] * len(parameters)
            if dy is not None:
                gradients = list(backward_op(dy, dtotal, *saved, *ctx.options, ctx.dtype, needs))
                if ctx.dtype == saved[0].dtype:
                    gradients[1] = gradients[0]
            elif dtotal is not None:
                gradients[0] = dtotal.to(ctx.dtype)
            needed = (
                g if is_needed else None for g, is_needed in zip(gradients, needs, strict=True)
            )
            return *needed, *[None] * (1 + len(options))

        forward = ["Tensor x", "Tensor residual", *parameters, *options.values(), dtype]
        return register_op(
            schema("fwd", forward, 2 + len(statistics)),
            self.forward,
            fake=self._forward_fake,
            cost=self.forward_cost,
            backward=differentiate,
            save=self._save,
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, _, *rest = inputs
        count = len(self.parameters)
        values = dict(zip(self.options, rest[count:], strict=False))
        ctx.options, ctx.dtype = [values[name] for name in self.backward_options], x.dtype
        _, total, *statistics = output
        ctx.save_for_backward(total, *rest[:count], *statistics)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)

    def forward_cost(
        self, args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]
    ) -> Cost:
        """Count each input read, y and the sum written once: the statistics follow from it."""
        return Cost(
            flops={accumulator_pipe(args[0].dtype): self.flops[0] * args[0].numel()},
            bytes_read=_bytes(args[: 2 + len(self.parameters)]),
            bytes_written=_bytes(outputs[:2]),
        )

    def backward_cost(
        self, args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor | None]
    ) -> Cost:
        """Count each input read and each gradient written once; partial sums are workspace."""
        total, needs = args[2], args[-1]
        width, sums = max(total.shape[-1], 1), sum(needs[2:])
        rows = total.numel() // width
        is_wide = self._launch_on_h200((rows, width), total.dtype).block_n < width
        return Cost(
            flops={accumulator_pipe(total.dtype): self.flops[1] * total.numel()},
            bytes_read=_bytes(args[:4]),
            bytes_written=_bytes(outputs),
            num_kernels=1 + (sums > 0) + (any(needs[:2]) and is_wide),
            workspace_bytes=self._workspace_bytes((rows, width), total.dtype, sums),
        )

    def _workspace_bytes(self, shape: tuple[int, int], dtype: torch.dtype, sums: int) -> int:
        """Return the bytes that live only during a backward pass, as launched on an H200."""
        chosen = self._launch_on_h200(shape, dtype)
        elements = chosen.num_programs * shape[1] * sums
        elements += len(self.statistics) * shape[0] * (chosen.block_n < shape[1])
        return elements * accumulator(dtype).itemsize

    def _launch_on_h200(self, shape: tuple[int, int], dtype: torch.dtype) -> RowConfig:
        return self.config(shape, dtype, find_gpu("h200"), "backward")

    def make_inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Make the tensors of a case: a stream larger than what a block adds to it."""
        options = dict(case.options)
        residual_dtype = options.pop("residual_dtype", case.dtype)

        def random(*size: int) -> torch.Tensor:
            wide = torch.promote_types(case.dtype, torch.float32)
            values = torch.randn(*size, generator=generator, device=generator.device, dtype=wide)
            return values.to(device)

        rows, width = case.shape["rows"], case.shape["N"]
        mean = 1.0 - options.get("offset", 0.0)
        tensors = {
            "x": random(rows, width).to(case.dtype),
            "residual": (3.0 * random(rows, width)).to(residual_dtype),
        }
        for name in self.parameters:
            tensors[name] = (mean * (name == "weight") + 0.1 * random(width)).to(case.dtype)
        return {**{n: tensor.requires_grad_() for n, tensor in tensors.items()}, **options}

    def cost_of(self, case: Case) -> dict[str, Cost]:
        """Return what a case must do at least."""
        x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
        total = x.to(case.options.get("residual_dtype", case.dtype))
        parameters = [x[0] if is_there else None for is_there in self._is_there(case)]
        there = self.forward_cost((x, total, *parameters), {}, (x, total))
        # Of x and a residual of its dtype both gradients are one.
        gradients = [x, *parameters] if total.dtype == x.dtype else [x, total, *parameters]
        needs = [True, True, *self._is_there(case)]
        back = self.backward_cost((x, total, total, *parameters, needs), {}, gradients)
        return {"forward": there, "forward_backward": there + back}

    def _is_there(self, case: Case) -> list[bool]:
        return [case.options.get(name, True) is not None for name in self.parameters]

    def extra_bytes_of(self, case: Case) -> int:
        """Return the bytes of a case beyond its inputs, outputs and gradients."""
        shape = case.shape["rows"], case.shape["N"]
        dtype = case.options.get("residual_dtype", case.dtype)
        statistics_bytes = len(self.statistics) * shape[0] * accumulator(case.dtype).itemsize
        return statistics_bytes + self._workspace_bytes(shape, dtype, sum(self._is_there(case)))

    def builds(self, arch: str) -> Sequence[KernelBuild]:
        """Return what is launched for the widths of common models, either dtype of the stream."""
        dtype = torch.float16 if arch == "sm_75" else torch.bfloat16
        with described_launches(gpu_of_arch(arch)) as builds:
            for rows, width in ((16384, 4096), (16384, 8192), (4096, 16384), (4096, 65536)):
                x = torch.empty(rows, width, dtype=dtype, device="meta")
                for residual in (x, x.float()):
                    self.run_both(x, residual)
        return with_budgets(builds, forward_registers=104)

    def run_both(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Launch forward and backward with all there is to compute, with values of common use."""
        parameters = [x[0] for _ in self.parameters]
        values = self.options.values()
        _, total, *statistics = self.forward(x, residual, *parameters, *values, x.dtype)
        passed = [self.options[name] for name in self.backward_options]
        needs = [True] * (2 + len(parameters))
        rest = chain(parameters, statistics, passed, (x.dtype, needs))
        self.backward(x, residual, total, *rest)


def _bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor is not None)


def case_of(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    """Return a case of (rows, N) named by its shape and the values of its options."""
    words = (f"{key}={value}".replace("torch.", "") for key, value in options.items())
    return Case(" ".join([f"{rows}x{width}", *words]), {"rows": rows, "N": width}, dtype, options)

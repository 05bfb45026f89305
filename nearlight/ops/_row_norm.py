"""Norms over rows as torch ops, of a tensor or of a residual stream and what is added to it.

    y = norm(x)                                 dx = dnorm(dy)
    total = residual + x,  y = norm(total)      dx = dresidual = dnorm(dy) + dtotal

The norm's own kernels add: four passes over the rows instead of five, and backward four instead of
six, for the sum is normalised while it is written, and its two gradients are added where they
arise. The stream may be fp32 beside half-precision blocks; each gradient is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import triton

from nearlight.core.cost import Cost, tensor_bytes
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import described_launches, gpu_of_arch, launch_gpu
from nearlight.core.op import Case, Inputs, KernelBuild, normal
from nearlight.core.register import register_op
from nearlight.core.row_config import RowConfig
from nearlight.core.rows import (
    FEW_COLUMNS,
    accumulator,
    accumulator_pipe,
    as_rows,
    column_sums,
    triton_accumulator,
)

# Half the host cost of `new_empty`; what is like a tensor of any strides is contiguous.
_empty_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RowNorm:
    """A norm over rows as torch ops.

    Attributes:
        name: of the op.
        config: its launch rule.
        forward_kernels: for rows that fit into a tile, and for wider ones. Arguments: x,
            parameters, y, statistics, residual and sum (or None), the row strides of x and
            residual; the number of rows for the first.
        backward_kernels: the pass itself, and the one before it that projects rows too wide for a
            tile. Arguments: dy, x, weight, statistics, as many projections (or None), then for the
            first dx, a partial sum per parameter, what else flows into x, and dx in a dtype of its
            own; the row strides of dy and x, for the first of what else flows in and the number of
            rows.
        parameters: names of (N,) tensors, the weight first.
        statistics: names of what the backward needs of each row.
        options: compile-time constants of the forward, by name, with values of common use.
        backward_options: names of those that the backward takes, too.
        flops: operations per element, forward and backward.
        shapes: (rows, N) of common models, compiled to be looked at.
        forward_registers: of a forward kernel with 32 elements per thread; more elements get more.
        has_residual: whether a residual is added to x first, and the sum returned, too.
        fuses_short_rows: whether the backward of few columns rounds a product and a sum once.
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
    shapes: Sequence[tuple[int, int]]
    forward_registers: int
    has_residual: bool = False
    fuses_short_rows: bool = False

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that get a gradient."""
        return "x", *(["residual"] if self.has_residual else []), *self.parameters

    @cached_property
    def _constants(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the options in the kernels, forward and backward."""
        return [n.upper() for n in self.options], [n.upper() for n in self.backward_options]

    def forward(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return y, the sum with a residual, and each statistic, (...) in accumulator dtype.

        Args:
            x: (..., N).
            rest: the residual, (..., N), where there is one; the parameters or None, the options,
                the dtype of y.
        """
        outputs = self._forward_fake(x, *rest)
        if x.numel() == 0:
            return tuple(output.zero_() for output in outputs)
        first = 1 if self.has_residual else 0
        last = first + len(self.parameters)
        x_rows = as_rows(x)
        rows, width = x_rows.shape
        residual, total = (as_rows(rest[0]), outputs[1]) if first else (None, None)
        tensors = (
            x_rows,
            *[None if each is None else each.contiguous() for each in rest[first:last]],
            outputs[0],
            *outputs[1 + first :],
            residual,
            total,
        )
        strides = x_rows.stride(0), None if residual is None else residual.stride(0)
        chosen = self.config((rows, width), x.dtype, launch_gpu(x.device))
        constants = dict(zip(self._constants[0], rest[last:], strict=False))
        constants |= {"N": width, "ACC": triton_accumulator(x.dtype), "BLOCK_N": chosen.block_n}
        constants["num_warps"] = chosen.num_warps
        kernel, wide_kernel = self.forward_kernels
        if chosen.block_n < width:
            wide_kernel[(rows,)](*tensors, *strides, NUM_STAGES=chosen.num_stages, **constants)
        else:
            constants["BLOCK_M"] = chosen.block_m
            kernel[(chosen.num_programs,)](*tensors, *strides, rows, **constants)
        return outputs

    def _forward_fake(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        y = _empty_like(x, dtype=rest[-1])
        statistics = [x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))]
        for _ in self.statistics[1:]:
            statistics.append(torch.empty_like(statistics[0]))
        return (y, _empty_like(rest[0]), *statistics) if self.has_residual else (y, *statistics)

    def backward(self, dy: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Return the gradients of x, residual and parameters; one not needed has no elements.

        Of x and a residual of its dtype both gradients are one, and the second has no elements.

        Args:
            dy: (..., N).
            rest: with a residual what else flows into the sum, (..., N), or None; x or the sum,
                (..., N); the parameters or None, the statistics, the options; with a residual the
                dtype of x; which gradients are needed.
        """
        gradients = self._backward_fake(dy, *rest)
        dx, *sums = [gradient if gradient.numel() else None for gradient in gradients]
        dtotal = dresidual = None
        if self.has_residual:
            (dtotal, x, weight), (dresidual, *sums) = rest[:3], sums
            if dx is None:
                dx, dresidual = dresidual, None
        else:
            x, weight = rest[:2]
        if x.numel() == 0:
            return tuple(gradient.zero_() for gradient in gradients)
        dy_rows, x_rows = as_rows(dy), as_rows(x)
        rows, width = x_rows.shape
        first = len(self.inputs)
        last = first + len(self.statistics)
        chosen = self.config((rows, width), x.dtype, launch_gpu(x.device), "backward")
        constants = dict(zip(self._constants[1], rest[last:], strict=False))
        constants |= {"N": width, "ACC": triton_accumulator(x.dtype), "BLOCK_N": chosen.block_n}
        constants |= {"NUM_STAGES": chosen.num_stages, "num_warps": chosen.num_warps}
        if not self.fuses_short_rows:
            # One rounding for a product and the mean taken off it would leave noise where the
            # gradient of a row of one or two columns is exactly zero.
            constants["enable_fp_fusion"] = width > FEW_COLUMNS
        weight = None if weight is None else weight.contiguous()
        tensors = dy_rows, x_rows, weight, *rest[first:last]
        strides = dy_rows.stride(0), x_rows.stride(0)
        acc, projections = accumulator(x.dtype), None
        if dx is not None and chosen.block_n < width:
            projections = x.new_empty((last - first, rows), dtype=acc)
            self.backward_kernels[1][(rows,)](*tensors, projections, *strides, **constants)
        dtotal_rows = None if dtotal is None else as_rows(dtotal)
        needed = [gradient for gradient in sums if gradient is not None]
        partials = x.new_empty((len(needed), chosen.num_programs, width), dtype=acc)
        places = iter([partials] if len(needed) == 1 else partials)
        self.backward_kernels[0][(chosen.num_programs * triton.cdiv(width, chosen.block_n),)](
            *tensors,
            projections,
            dx,
            *[None if gradient is None else next(places) for gradient in sums],
            dtotal_rows,
            dresidual,
            *strides,
            None if dtotal_rows is None else dtotal_rows.stride(0),
            rows,
            BLOCK_M=chosen.block_m,
            HOLD=chosen.holds_parameters,
            **constants,
        )
        if needed:
            column_sums(partials, *needed)
        return gradients

    def _backward_fake(self, dy: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        needs = rest[-len(self.inputs) :]
        if self.has_residual:
            (_, x, *parameters), (needs_dx, needs_dresidual, *needs_sums) = rest, needs
            dtype = rest[-1 - len(needs)]
            if dtype == x.dtype:
                needs_dx, needs_dresidual = needs_dx or needs_dresidual, False
            dx = _empty_like(x, dtype=dtype) if needs_dx else x.new_empty(0, dtype=dtype)
            of_rows = [dx, _empty_like(x) if needs_dresidual else x.new_empty(0)]
        else:
            (x, *parameters), (needs_dx, *needs_sums) = rest, needs
            of_rows = [_empty_like(x) if needs_dx else x.new_empty(0)]
        sums = [
            _empty_like(each) if is_needed else (x if each is None else each).new_empty(0)
            for each, is_needed in zip(parameters, needs_sums, strict=False)
        ]
        return *of_rows, *sums

    def register(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Define the torch ops and return the forward's."""
        options = {n: f"{type(v).__name__} {n}" for n, v in self.options.items()}
        parameters = [f"Tensor? {name}" for name in self.parameters]
        statistics = [f"Tensor {name}" for name in self.statistics]
        passed = [options[name] for name in self.backward_options]
        needs = [f"bool needs_d{name}" for name in self.inputs]
        dtype, residual, rows = "ScalarType dtype", [], ["Tensor dy", "Tensor x"]
        if self.has_residual:
            residual, rows = ["Tensor residual"], ["Tensor dy", "Tensor? dtotal", "Tensor total"]
            passed.append(dtype)
        taken = [*rows, *parameters, *statistics, *passed, *needs]
        backward_op = register_op(
            _schema(f"{self.name}_bwd", taken, len(needs)),
            self.backward,
            fake=self._backward_fake,
            cost=self.backward_cost,
            is_static=True,
        )
        first, last, nones = 1 + len(residual), len(self.inputs), [None] * (len(options) + 1)
        passed_at = [last + list(options).index(name) for name in self.backward_options]

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            normed, statistics = output[1] if residual else inputs[0], output[first:]
            ctx.passed = [inputs[at] for at in passed_at]
            if residual:
                ctx.passed.append(inputs[0].dtype)
            ctx.save_for_backward(normed, *inputs[first:last], *statistics)
            ctx.mark_non_differentiable(*statistics)
            ctx.set_materialize_grads(False)

        def differentiate(
            ctx: Any, dy: torch.Tensor | None, *others: torch.Tensor | None
        ) -> tuple[Any, ...]:
            needs, dtotal = ctx.needs_input_grad[:last], others[: len(residual)]
            gradients: Sequence[Any]
            if dy is not None:
                saved = ctx.saved_tensors
                gradients = backward_op(dy, *dtotal, *saved, *ctx.passed, *needs)
                if residual and gradients[0].dtype == saved[0].dtype:
                    gradients = gradients[0], gradients[0], *gradients[2:]
            elif residual and dtotal[0] is not None:
                gradients = dtotal[0].to(ctx.passed[-1]), *dtotal, *[None for _ in parameters]
            else:
                gradients = [None for _ in needs]
            if False in needs:
                pairs = zip(gradients, needs, strict=True)
                gradients = [gradient if is_needed else None for gradient, is_needed in pairs]
            return *gradients, *nones

        taken = ["Tensor x", *residual, *parameters, *options.values(), dtype]
        return register_op(
            _schema(f"{self.name}_fwd", taken, 1 + len(residual) + len(statistics)),
            self.forward,
            fake=self._forward_fake,
            cost=self.forward_cost,
            backward=differentiate,
            save=save,
            is_static=True,
        )

    def forward_cost(
        self, args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor]
    ) -> Cost:
        """Count each input read, y and the sum written once: the statistics follow from them."""
        return Cost(
            flops={accumulator_pipe(args[0].dtype): self.flops[0] * args[0].numel()},
            bytes_read=_bytes(args[: len(self.inputs)]),
            bytes_written=_bytes(outputs[: 1 + self.has_residual]),
        )

    def backward_cost(
        self, args: Sequence[Any], kwargs: Any, outputs: Sequence[torch.Tensor | None]
    ) -> Cost:
        """Count each input read and each gradient written once; partial sums are workspace."""
        x, needs = args[1 + self.has_residual], args[-len(self.inputs) :]
        needs_rows, sums = needs[: -len(self.parameters)], sum(needs[-len(self.parameters) :])
        width = max(x.shape[-1], 1)
        rows = x.numel() // width
        is_wide = self._launch_on_h200((rows, width), x.dtype).block_n < width
        return Cost(
            flops={accumulator_pipe(x.dtype): self.flops[1] * x.numel()},
            bytes_read=_bytes(args[: 3 + self.has_residual]),
            bytes_written=_bytes(outputs),
            num_kernels=1 + (sums > 0) + (any(needs_rows) and is_wide),
            workspace_bytes=self._workspace_bytes((rows, width), x.dtype, sums),
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
        """Make the tensors of a case; a stream is larger than what a block adds to it."""
        options = dict(case.options)
        residual_dtype = options.pop("residual_dtype", case.dtype)
        random = partial(normal, case, device, generator)
        rows, width = case.shape["rows"], case.shape["N"]
        mean = 1.0 - options.get("offset", 0.0)
        tensors = {"x": random(rows, width).to(case.dtype)}
        if self.has_residual:
            tensors["residual"] = (3.0 * random(rows, width)).to(residual_dtype)
        for name in self.parameters:
            tensors[name] = (mean * (name == "weight") + 0.1 * random(width)).to(case.dtype)
        return {**{n: tensor.requires_grad_() for n, tensor in tensors.items()}, **options}

    def cost_of(self, case: Case) -> dict[str, Cost]:
        """Return what a case must do at least."""
        x = torch.empty(case.shape["rows"], case.shape["N"], dtype=case.dtype, device="meta")
        normed = x.to(case.options.get("residual_dtype", case.dtype))
        written = [x, normed][: 1 + self.has_residual]
        parameters = [x[0] if is_there else None for is_there in self._is_there(case)]
        there = self.forward_cost((*written, *parameters), {}, written)
        # Of x and a residual of its dtype both gradients are one.
        gradients = [x, *parameters] if normed.dtype == x.dtype else [x, normed, *parameters]
        args = x, *[normed for _ in written], *parameters, *[True for _ in written]
        back = self.backward_cost((*args, *self._is_there(case)), {}, gradients)
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
            for rows, width in self.shapes:
                x = torch.empty(rows, width, dtype=dtype, device="meta")
                for residual in (x, x.float()) if self.has_residual else (x,):
                    self.run_both(x, residual)
        return [replace(build, max_registers=self._max_registers(build)) for build in builds]

    def _max_registers(self, build: KernelBuild) -> int:
        threads = 32 * build.num_warps
        if "_bwd_" in build.name:
            return min(144, 65536 // threads)  # a program of any size must find room on an SM
        elements = build.constants.get("BLOCK_M", 1) * build.constants["BLOCK_N"]
        return int(self.forward_registers * max(1, elements // (32 * threads)))

    def run_both(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Launch both directions with all there is to compute and options of common use.

        A norm that adds no residual leaves it aside.
        """
        added, dtype = ([residual], [x.dtype]) if self.has_residual else ([], [])
        parameters = [x[0] for _ in self.parameters]
        _, *kept = self.forward(x, *added, *parameters, *self.options.values(), x.dtype)
        normed, statistics = (kept[0], kept[1:]) if self.has_residual else (x, kept)
        passed = [self.options[name] for name in self.backward_options] + dtype
        needs = [True for _ in self.inputs]
        self.backward(x, *added, normed, *parameters, *statistics, *passed, *needs)


def _schema(name: str, arguments: Sequence[str], num_outputs: int) -> str:
    return f"{name}({', '.join(arguments)}) -> ({', '.join(['Tensor'] * num_outputs)})"


def _bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor is not None)


def case_of(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    """Return a case of (rows, N) named by its shape and the values of its options."""
    words = (f"{key}={value}".replace("torch.", "") for key, value in options.items())
    return Case(" ".join([f"{rows}x{width}", *words]), {"rows": rows, "N": width}, dtype, options)

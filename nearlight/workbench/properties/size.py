"""Property 4: offsets beyond 2³¹ elements are right: scanned, spread out, and at full size."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from nearlight.core import backend
from nearlight.core.builds import compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.op import Inputs, KernelBuild, Op
from nearlight.workbench.bad_source import builds_of
from nearlight.workbench.compare import Compared, settle, tensor_differs
from nearlight.workbench.flat import refused_layouts
from nearlight.workbench.offsets import narrow_products
from nearlight.workbench.property import (
    NeedsGpu,
    NotApplicable,
    Property,
    any_case,
    base_cases,
    plural,
    provable,
    remark,
)
from nearlight.workbench.trial import (
    UPSTREAM,
    Rejected,
    Trial,
    Upstream,
    differentiable,
    held_to,
    kernels,
    make_inputs,
    make_upstream,
    run,
    standard,
    tensors,
)

LAST_ROWS = 8
SCAN, SCANNED_ARCH = "scan", "sm_90"
SPREAD = " spread past 2³¹ elements"
# Cases looked at for tensors that can be spread.
MAX_CASES = 8
# The third row lies past the limit, and the stride alone still fits into the 32 bits that Triton
# gives it; of many rows, most do.
MIN_ROWS, _STRIDE = 3, 2**30
_LIMIT, _REACH = 2**31, 2**34
# Linux lends the addresses, and no memory; Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000
# What the other dimensions may take.
_SLACK = 1 << 20


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """The static scan; then on a GPU the large cases, on a CPU each tensor spread far out."""
    builds = builds_of(op, SCANNED_ARCH)
    found = [Trial(any_case(op), step=SCAN)] if builds else []
    if device != "cpu":
        found += [Trial(case) for case in op.large_cases]
    elif not any(isinstance(build.kernel, Kernel) for build in builds):
        found += _spread_trials(op)
    if not found and device != "cpu":
        raise NotApplicable("the record names no builds to scan and no case past 2³¹ elements")
    if not found:
        raise NeedsGpu(
            "the record names no builds to scan, and there is no input with rows to spread or no "
            "room for one: run it on a GPU with a large case"
        )
    yield from found


def examine(op: Op, trial: Trial, device: str) -> str:
    """Scan the builds, spread one tensor, or run the whole of a large case, as `step` says."""
    if trial.step == SCAN:
        return _scan(op)
    if trial.step.endswith(SPREAD):
        return _spread_out(op, trial, device)
    return _last_rows_differ(op, trial, device)


def _scan(op: Op) -> str:
    builds = builds_of(op, SCANNED_ARCH)
    for build in builds:
        for each in (build, grown) if (grown := _grown(build)) != build else (build,):
            if found := narrow_products(compile_build(each, SCANNED_ARCH)):
                more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
                return f"{build.name} at {found[0]}{more}"
    remark(f"no 32-bit product in an offset of {plural(len(builds), 'kernel')} on {SCANNED_ARCH}")
    return ""


def _grown(build: KernelBuild) -> KernelBuild:
    """Return a build of one size as Triton compiles it where that passes 2³¹."""
    sizes = [name for name, kind in build.signature.items() if kind.startswith("i32")]
    grown = {name: build.signature[name].replace("i32", "i64") for name in sizes[:1]}
    return replace(build, signature={**build.signature, **grown}) if len(sizes) == 1 else build


def _spread_trials(op: Op) -> Iterator[Trial]:
    """Yield a trial for each dimension of a floating tensor, on one case of each option.

    Where none of these has rows enough, on the smallest that has. The last dimension as well: a
    launcher that takes any strides multiplies columns by them.
    """
    done: set[str] = set()
    covers = base_cases(op, quick=False)
    others = [case for case in provable(op)[:MAX_CASES] if case not in covers]
    for case in [*covers, *others]:
        inputs = make_inputs(op, Trial(case), "cpu")
        outputs = run(op.reference, inputs, None).outputs
        upstream = next((g for g in make_upstream(outputs, Trial(case)) if g is not None), None)
        named = tensors(inputs)
        if upstream is not None and differentiable(inputs):
            named[UPSTREAM] = upstream
        for name, tensor in named.items():
            if "strided" in refused_layouts(op, name) or not _has_room(tensor):
                continue
            for dim in range(tensor.ndim):
                step = f"{name} dim {dim}{SPREAD}"
                is_new = case in covers or step not in done
                if is_new and tensor.shape[dim] >= MIN_ROWS:
                    done.add(step)
                    yield Trial(case, step=step)


def _has_room(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be spread, and the process may have that many addresses."""
    if not tensor.dtype.is_floating_point or not 0 < tensor.numel() < _SLACK:
        return False
    try:
        _untouched(tensor.element_size()).close()
    except OSError:  # a limit on the process, of which the op knows nothing
        return False
    return True


def _spread_out(op: Op, trial: Trial, device: str) -> str:
    """Hold the op to the rule on a view whose last row lies past 2³¹ elements of the first."""
    name, _, dim_text = trial.step.removesuffix(SPREAD).rpartition(" dim ")
    dim = int(dim_text)

    def compute(again: Trial) -> Compared:
        expected = standard(op, again, device)
        inputs, upstream = dict(expected.inputs), list(expected.upstream)
        if name == UPSTREAM:
            index = next(i for i, gradient in enumerate(upstream) if gradient is not None)
            upstream[index] = _spread(upstream[index], dim)
        else:
            inputs[name] = _spread(inputs[name], dim)
        with backend.force("triton"), torch.enable_grad():
            return Compared(run(op.function, inputs, upstream), expected)

    if reason := settle(compute, trial):
        return f"{trial.step}, as a 32-bit offset does not reach: {reason}"
    remark(name + SPREAD)
    return ""


def _spread(tensor: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Return equal values with one dimension spread over memory that is otherwise never touched.

    What 32 bits reach lies before the first element as well: where an offset wraps to a negative
    one, there is a wrong value to be found, and not the end of the process.
    """
    if tensor is None or tensor.shape[dim] < MIN_ROWS:
        raise Rejected(f"dimension {dim} has fewer than {MIN_ROWS} rows")
    strides = [
        math.prod(size for d, size in enumerate(tensor.shape) if d > before and d != dim)
        for before in range(tensor.ndim)
    ]
    strides[dim] = min(_STRIDE, _REACH // (tensor.shape[dim] - 1) // 16 * 16)
    storage = torch.frombuffer(_untouched(tensor.element_size()), dtype=tensor.dtype)
    view = storage.as_strided(tensor.shape, strides, _LIMIT)
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _untouched(element_size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, (_LIMIT + _REACH + _SLACK) * element_size, flags=flags)


def _last_rows_differ(op: Op, trial: Trial, device: str) -> str:
    """Run the whole input, and hold its last rows to the reference of those rows alone."""
    inputs = make_inputs(op, trial, device)
    num_rows = next(iter(tensors(inputs).values())).shape[0]
    upstream: Upstream = []
    if differentiable(inputs):  # an upstream gradient takes as much memory as the outputs
        with kernels(), torch.no_grad():
            upstream = make_upstream(run(op.function, inputs, None).outputs, trial)
    with kernels(), torch.enable_grad():
        whole = run(op.function, inputs, upstream)
    tail = _last_rows(inputs, num_rows)
    above = [u[-LAST_ROWS:] if u is not None and len(u.shape) and u.shape[0] == num_rows else u
             for u in upstream]  # fmt: skip
    expected = held_to(partial(run, op.reference), tail, above)
    plain, truth = expected.plain, expected.truth
    found = [
        (f"output {index}", output, plain.outputs[index], truth.outputs[index])
        for index, output in enumerate(whole.outputs)
        if output.ndim and output.shape[0] == num_rows
    ]
    for name in differentiable(tail):
        gradient, near, true = (r.gradients[name] for r in (whole, plain, truth))
        if gradient is not None and gradient.shape[0] == num_rows:
            assert near is not None and true is not None
            found.append((f"gradient of {name}", gradient, near, true))
    for label, actual, near, true in found:
        if reason := tensor_differs(actual[-LAST_ROWS:], near, true):
            return f"last rows of {label}: {reason}"
    return "" if found else "nothing of the op's results has a row per input row"


def _last_rows(inputs: Inputs, num_rows: int) -> Inputs:
    cut = {
        name: tensor[-LAST_ROWS:].detach().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors(inputs).items()
        if tensor.ndim and tensor.shape[0] == num_rows
    }
    return {**inputs, **cut}


PROPERTY = Property(4, "size", "offsets past 2³¹ elements are right", trials, examine)

"""Property 8: an op is at home in torch: its registration, compiler, autocast, graphs, streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nearlight.core import backend
from nearlight.core.cuda import NoEmulator
from nearlight.core.op import Case, Inputs, Op
from nearlight.workbench import layouts
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.flat import refused_layouts
from nearlight.workbench.gpu_steps import DEVICE_STEPS, GPU_STEPS
from nearlight.workbench.launches import launches
from nearlight.workbench.property import Property, base_cases, cover
from nearlight.workbench.raised import meant_by_torch
from nearlight.workbench.trial import (
    Rejected,
    Result,
    Standard,
    Trial,
    Upstream,
    call,
    differentiable,
    fresh,
    make_inputs,
    make_upstream,
    roots_of,
    run,
    standard,
    tensors,
    to_dtype,
)

# gradcheck calls the op twice per element.
MAX_GRADCHECK_SIZE, SMALL_SIZE = 8, 7
ROW_COUNTS = (5, 9, 12, 17, 21, 29, 34, 38)
NUM_ROW_COUNTS = 4
# One for the first row count, one for all others.
MAX_GRAPHS = 2
MAX_REASON_LENGTH = 240

# What stands in opcheck's message, and what kind of fault that is.
FAULTS = (
    ("Stride mismatch", "wrong fake stride (the kernel's, then the fake's)"),
    ("Dtypes ", "wrong fake dtype (the kernel's, then the fake's)"),
    ("Shapes ", "wrong fake shape (the kernel's, then the fake's)"),
    ("not defined as mutable", "undeclared mutation"),
    ("alias", "returns an alias"),
    ("no fake impl", "no fake"),
    ("does not have an autograd kernel", "no autograd"),
)
_NOT_THE_USERS = ("aten", "prim", "prims", "profiler")


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each step on a small case of each option; what does not depend on options on one."""
    cases = base_cases(op, quick)
    first, moved = cases[0], _elsewhere(op, cases[0], device)
    for index, case in enumerate(cases):
        # Autocast leaves fp64 alone.
        steps = ["opcheck", *(["autocast"] if case.dtype != torch.float64 else [])]
        for step in steps + (list(GPU_STEPS) if device != "cpu" else []):
            yield Trial(case, index, step=step)
    for case in cover([case for case in op.check_cases if case.dtype == torch.float64]):
        if differentiable(make_inputs(op, Trial(case), device)):
            yield _small(op, Trial(case, step="gradcheck"), device)
    yield Trial(first, step="opcheck", layouts=moved)
    yield Trial(first, step="compile")
    yield Trial(first, step="compile", layouts=moved)
    if torch.distributed.is_available():
        yield Trial(first, step="DTensor")
    if device != "cpu" and torch.cuda.device_count() > 1:
        yield from (Trial(first, step=step) for step in DEVICE_STEPS)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Take the trial's step with the op."""
    if trial.step not in STEPS:
        raise ValueError(f"step {trial.step!r}: allowed are {', '.join(STEPS)}")
    try:
        with backend.force("triton"), torch.enable_grad():
            reason = STEPS[trial.step](op, trial, device)
    except (Rejected, NoEmulator):
        raise
    except Exception as error:  # whatever torch or the op raises is the finding
        told = meant_by_torch(error, op, device)
        reason = f"{type(error).__name__}: {told}" if told else _in_one_line(error)
    return f"{trial.step}: {reason}" if reason else ""


def _elsewhere(op: Op, case: Case, device: str) -> dict[str, str]:
    """Return a layout that is not contiguous for each tensor that may have one."""
    found: dict[str, str] = {}
    for name, tensor in tensors(make_inputs(op, Trial(case), device)).items():
        for layout, num_dims in (("transposed", 2), ("strided [::2] dim -1", 1)):
            is_refused = layouts.family(layout) in refused_layouts(op, name)
            if tensor.ndim >= num_dims and not is_refused:
                found.setdefault(name, layout)
    return found


def _small(op: Op, trial: Trial, device: str) -> Trial:
    """Return the trial with its large sizes made small, where the op has such inputs."""
    sizes = {
        name: SMALL_SIZE for name, size in trial.case.shape.items() if size > MAX_GRADCHECK_SIZE
    }
    smaller = trial.resized(**sizes)
    return smaller if _takes(op, smaller, device) else trial


def _takes(op: Op, trial: Trial, device: str) -> bool:
    """Return whether the op has this input, and does not refuse it by a ValueError."""
    try:
        expected = standard(op, trial, device)
        with backend.force("triton"):
            run(op.function, expected.inputs, None)
    except (Rejected, ValueError):
        return False
    return True


def _in_one_line(error: Exception) -> str:
    """Return the line of an error that tells the reason, without what torch wraps around it."""
    whole = str(error).strip() or "no message"
    text = re.sub(r"^Dynamo failed to run FX node .*?\): got ", "", whole, flags=re.DOTALL)
    text = re.sub(r"^backend='[^']*' raised:\n", "", text)
    frames = [
        f"; at {Path(file).name}, line {line}: {code}"
        for file, line, code in re.findall(r'File "([^"]*)", line (\d+), in .*\n +(.*)', whole)
        if not Path(file).is_relative_to(Path(torch.__file__).parent)
    ]
    kind = type(error).__name__.replace("Unsupported", "graph break")
    return f"{kind}: {text.splitlines()[0]}"[:MAX_REASON_LENGTH] + "".join(frames[-1:])


class _Calls(TorchDispatchMode):
    """Notes the arguments of every torch op that is not torch's own, each kind of call once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, Any, Any]] = {}
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _NOT_THE_USERS:
            # Below a hand-written autograd.Function, and in a backward, no gradient is asked of it.
            has_autograd = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd")
            is_differentiated = not self.is_backward and (torch.is_grad_enabled() or has_autograd)

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.detach().requires_grad_(is_differentiated and tensor.requires_grad)

            kept = tree_map_only(torch.Tensor, keep, (args, kwargs))
            kind = [
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in tree_leaves(kept)
            ]
            self.calls.setdefault((func, str(kind)), (func, *kept))
        return func(*args, **kwargs)


def _opcheck(op: Op, trial: Trial, device: str) -> str:
    """Run torch's own check on every op that the function calls, with its real arguments."""
    inputs = fresh(make_inputs(op, trial, device))
    with launches() as launched, _Calls() as noted:
        outputs = call(op.function, inputs)
        noted.is_backward = True
        roots, above = roots_of(outputs, make_upstream(outputs, trial))
        if roots:
            wanted = [inputs[name] for name in differentiable(inputs)]
            torch.autograd.grad(roots, wanted, above, allow_unused=True)
    if launched and not noted.calls:
        return (
            f"{launched[0][0]} is launched outside any torch op, so that neither the compiler nor "
            "DTensor sees it; register one by nearlight.core.register.register_op"
        )
    for func, args, kwargs in noted.calls.values():
        try:
            torch.library.opcheck(func, args, kwargs)
        except Exception as error:
            cause = error.__cause__ or error
            text = str(cause).strip() or type(cause).__name__
            kind = next((kind for words, kind in FAULTS if words in text), None)
            if type(cause).__name__ == "UnsupportedOperatorException":
                kind = "no fake"
            detail = text.rpartition("metadata: ")[2].splitlines()[0][:MAX_REASON_LENGTH]
            return f"{func.name()}: {kind or type(cause).__name__}: {detail}"
    return ""


def _gradcheck(op: Op, trial: Trial, device: str) -> str:
    """Hold the backward of the fp64 path to differences of its own forward."""
    inputs = fresh(make_inputs(op, trial, device))
    names = [name for name in differentiable(inputs) if inputs[name].dtype == torch.float64]

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = call(op.function, {**inputs, **dict(zip(names, leaves, strict=True))})
        return tuple(output for output in outputs if output.requires_grad)

    try:
        torch.autograd.gradcheck(function, tuple(inputs[name] for name in names), fast_mode=False)
    except GradcheckError as error:
        first = str(error).strip().splitlines()[0].rstrip(",")
        return re.sub(r"input (\d+)", lambda found: f"input {names[int(found[1])]}", first)
    return ""


def _compile(op: Op, trial: Trial, device: str) -> str:
    """Compile whole, forward and backward; other row counts share one more graph."""
    graphs = set()  # by id, for Dynamo may trace one anew, as it does for a number in fp64

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.add(torch._guards.CompileContext.current_compile_id())
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(op.function, fullgraph=True, backend=backend)

    def compute(trial: Trial) -> Compared:
        expected = standard(op, trial, device)
        return Compared(run(compiled, expected.inputs, expected.upstream), expected)

    rows, num_rows = next(iter(trial.case.shape.items()), ("rows", 1))
    # Equal sizes would share a symbol, and part again in a graph of their own.
    others = [count for count in ROW_COUNTS if count not in trial.case.shape.values()]
    others = [count for count in others if _takes(op, trial.resized(**{rows: count}), device)]
    counts = [num_rows, *([] if trial.layouts else others[: NUM_ROW_COUNTS - 1])]
    try:
        for index, count in enumerate(counts):
            if reason := settle(compute, trial.resized(**{rows: count})):
                return f"with {rows} {count}: {reason}"
            if len(graphs) > MAX_GRAPHS:
                tried = ", ".join(map(str, counts[: index + 1]))
                return f"{len(graphs)} graphs for {rows} {tried}: recompiles per row count"
    finally:
        torch._dynamo.reset()
    return ""


def _autocast(op: Op, trial: Trial, device: str) -> str:
    """Take autocast as the reference does, or leave the dtypes alone: either is right."""
    # torch promotes no mixture of fp16 and bf16 under autocast.
    half = torch.float16 if trial.case.dtype == torch.float16 else torch.bfloat16

    def mixed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**inputs: Any) -> Any:  # the backward runs outside, as torch's docs ask
            with torch.autocast(torch.device(device).type, half):
                return function(**inputs)

        return call

    def held_to(reference: Callable[..., Any]) -> Callable[[Trial], Compared]:
        def compute(trial: Trial) -> Compared:
            inputs = make_inputs(op, trial, device)
            upstream = make_upstream(run(reference, inputs, None).outputs, trial)
            plain = run(reference, inputs, upstream)
            double = torch.float64
            truth = run(op.reference, to_dtype(inputs, double), to_dtype(upstream, double))
            actual = run(mixed(op.function), inputs, upstream)
            return Compared(actual, Standard(inputs, upstream, plain, truth))

        return compute

    reason = settle(held_to(mixed(op.reference)), trial)
    return reason if reason and settle(held_to(op.reference), trial) else ""


def _dtensor(op: Op, trial: Trial, device: str) -> str:
    """Give the right DTensors, or refuse them in words that a user understands."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def compute(trial: Trial) -> Compared | str:
        expected = standard(op, trial, device)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            spread = distribute_tensor(tensor.detach(), mesh, [Replicate()])
            return spread.requires_grad_(tensor.requires_grad)

        inputs: Inputs = tree_map_only(torch.Tensor, spread, expected.inputs)
        try:
            outputs = call(op.function, inputs)
            if not all(isinstance(output, DTensor) for output in outputs):
                return "a plain tensor comes back: it took one rank's shard for the whole"
            upstream: Upstream = [g if g is None else spread(g) for g in expected.upstream]
            roots, above = roots_of(outputs, upstream)
            names = differentiable(inputs) if roots else []
            wanted = [inputs[name] for name in names]
            found = torch.autograd.grad(roots, wanted, above, allow_unused=True) if names else ()
        except (TypeError, ValueError, NotImplementedError) as error:
            # The second is how torch itself refuses DTensors for an op of the user's.
            if any(words in str(error) for words in ("DTensor", "sharding strategy")):
                return Compared(expected.plain, expected)  # a clear refusal: nothing of ours
            raise
        whole = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (outputs, found))
        return Compared(Result(whole[0], dict(zip(names, whole[1], strict=True))), expected)

    with _process_group():
        mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
        return settle(compute, trial)


@contextmanager
def _process_group() -> Iterator[None]:
    """Be a group of one process, unless there is a group already."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend called fake

    if torch.distributed.is_initialized():
        yield
        return
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # exported by a star
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


STEPS: dict[str, Callable[[Op, Trial, str], str]] = {
    "opcheck": _opcheck,
    "gradcheck": _gradcheck,
    "compile": _compile,
    "autocast": _autocast,
    "DTensor": _dtensor,
    **GPU_STEPS,
    **DEVICE_STEPS,
}

PROPERTY = Property(
    8,
    "torch",
    "opcheck, gradcheck, compile, autocast, DTensor, CUDA graphs, streams and devices hold",
    trials,
    examine,
)

"""Trace a training step or a forward pass without a GPU: every op, its cost, and all memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from nearlight.core import backend, cost
from nearlight.core.cost import Cost
from nearlight.core.errors import BadInput
from nearlight.profiler import lowering
from nearlight.profiler.aten_cost import is_stream, is_strided, stream_cost, tensors_in
from nearlight.profiler.attribution import Attribution, Place
from nearlight.profiler.imagined_gpu import fake_batch, fake_copy, imagined_gpu
from nearlight.profiler.memory import Ledger, Timeline
from nearlight.profiler.optimizers import make_optimizer
from nearlight.profiler.target import Batch, Target, sizes
from nearlight.profiler.transformers_masks import masks_as_on_a_gpu

Phase = Literal["setup", "forward", "backward", "optimizer"]


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor that no longer exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One op of a step.

    Attributes:
        name: torch's name ("aten::mm").
        place: module, function and line that called it.
        phase: forward, backward or optimizer.
        inputs: its tensor arguments.
        outputs: its results.
        cost: flops, bytes, kernels.
        is_modelled: False where the cost is only a guess from the sizes.
        is_strided: element-wise over operands that are broadcast or not dense in one order.
        is_recomputed: whether a checkpointed forward ran it again.
    """

    name: str
    place: Place
    phase: Phase
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    cost: Cost
    is_modelled: bool
    is_strided: bool
    is_recomputed: bool


@dataclass(frozen=True)
class Trace:
    """A step as a GPU would see it.

    Attributes:
        task: train, prefill or decode.
        optimizer: name of the optimizer, "" without one.
        calls: ops that launch kernels, in order.
        num_host_ops: ops the host works through, views included.
        num_host_syncs: times the host waited for a number from the GPU (`.item()`).
        timeline: memory from the step's start to its end.
        parameter_bytes, gradient_bytes, optimizer_bytes, input_bytes: what a step has to move.
        num_tokens: tokens per step, None where the batch has none.
        num_samples: sequences or images per step.
    """

    task: str
    optimizer: str
    calls: tuple[Call, ...]
    num_host_ops: int
    num_host_syncs: int
    timeline: Timeline
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    num_tokens: int | None
    num_samples: int


def trace(
    target: Target,
    optimizer: str = "adamw-fused",
    prepare: Callable[[nn.Module], Any] | None = None,
    steps: int = 2,
) -> Trace:
    """Trace a target on fake tensors as if it ran on a CUDA device; no GPU, no memory, no values.

    Args:
        target: what `target.load` or `target.from_model` returns.
        optimizer: a name of `optimizers.OPTIMIZERS`; only used for the task train.
        prepare: called with the fake model before the first step (patching, for example).
        steps: steps to run; the last is the one described. The first step of training has no
            optimizer state yet, so its peak is too low.

    Returns:
        the last step: calls with costs, and the memory timeline.

    Raises:
        ValueError: unknown optimizer or steps < 1.
        BadInput: a program whose shapes depend on values.

    Example:
        >>> step = trace(load("smollm2-135m", batch=8, seq=2048))  # doctest: +SKIP
        >>> step.timeline.peak().num_bytes  # doctest: +SKIP
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step has to run")
    is_training = target.task == "train"
    with ExitStack() as stack:
        stack.enter_context(backend.force("triton"))
        # The user's own code makes model and batch together, and that model may be too large to
        # exist for real; elsewhere sizes are enough, for such a batch has no mask to look into.
        known_batch = None if target.batch is None else target.make_batch("meta")
        fake_mode = stack.enter_context(imagined_gpu())
        recorder = stack.enter_context(_Recorder())
        if known_batch is None:
            model, known_batch = target.make("cpu", False)
        else:
            model = target.make_model("cpu", weights=False)
        model = fake_copy(model, fake_mode).train(is_training)
        if prepare is not None:
            prepare(model)
        batch = fake_batch(known_batch, fake_mode)
        updater = make_optimizer(optimizer, model.parameters()) if is_training else None
        stack.enter_context(masks_as_on_a_gpu(known_batch))
        stack.enter_context(recorder.watching(model, batch))
        try:
            for _ in range(steps):
                gc.collect()
                recorder.start_step()
                run_step(target, model, batch, updater, recorder.enter_phase)
        except DynamicOutputShapeException as error:
            raise _needs_values(error.func) from None
        return _describe(recorder, target, optimizer, model, batch, updater)


def record_step(
    target: Target, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None
) -> tuple[tuple[Call, ...], Timeline]:
    """Run one real step and return its ops with their costs, and its memory timeline.

    Args:
        target: says what a step computes.
        model: on any device.
        batch: on the same device.
        optimizer: with the state of earlier steps; None for a forward pass.
    """
    with _Recorder() as recorder, recorder.watching(model, batch):
        if optimizer is not None:
            recorder.label_state(model, optimizer)
        recorder.start_step()
        run_step(target, model, batch, optimizer, recorder.enter_phase)
        return tuple(recorder.calls), recorder.ledger.timeline()


def run_step(
    target: Target,
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    enter_phase: Callable[[Phase, nn.Module, Any], None] = lambda phase, model, optimizer: None,
) -> None:
    """Run one step of a target: forward, and backward and update where there is an optimizer."""
    enter_phase("forward", model, optimizer)
    with nullcontext() if optimizer is not None else torch.no_grad():
        loss = target.loss(model, batch)
    if optimizer is None:
        enter_phase("setup", model, optimizer)
        return
    enter_phase("backward", model, optimizer)
    loss.backward()
    enter_phase("optimizer", model, optimizer)
    optimizer.step()
    enter_phase("setup", model, optimizer)
    optimizer.zero_grad(set_to_none=True)


class _Recorder(TorchDispatchMode):
    """Sees every op below autograd, above the fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.attribution: Attribution | None = None
        self.phase: Phase = "setup"
        self.calls: list[Call] = []
        self.num_host_ops = 0
        self.num_host_syncs = 0
        self.gradient_bytes = 0

    @contextmanager
    def watching(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Attribute ops to the parts of a model; its parameters and the batch are known memory."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.ledger.add(tensor, owner="parameters", name=name)
        for name, tensor in batch.items():
            self.ledger.add(tensor, owner="inputs", name=name)
        self.attribution = Attribution(model, self.ledger.mark_module_output)
        with self.attribution.watching():
            yield

    def start_step(self) -> None:
        self.calls.clear()
        self.num_host_ops = self.num_host_syncs = 0
        self.ledger.start_step()
        if self.attribution is not None:
            self.attribution.forget_nodes()

    def enter_phase(self, phase: Phase, model: nn.Module, optimizer: Any) -> None:
        if self.phase == "forward":
            self.ledger.end_forward()
        if self.phase == "backward":
            named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            for name, grad in named:
                self.ledger.label(grad, "gradients", f"gradient of {name}")
            self.gradient_bytes = cost_bytes(grad for _, grad in named)
        if self.phase == "optimizer":
            self.label_state(model, optimizer)
        self.phase = phase

    def label_state(self, model: nn.Module, optimizer: Any) -> None:
        """Charge an optimizer's state to it."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.ledger.add(value)
                    self.ledger.label(value, "optimizer", f"{key} of {names[parameter]}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three dispatches ask this
        if self.phase == "setup" or func.namespace in ("prim", "profiler"):
            return self._run(func, args, kwargs)
        if _is_composite(func):
            with self:  # in inference mode composite ops arrive whole
                return func.decompose(*args, **kwargs)
        outputs = self._run(func, args, kwargs)
        self._record(func, args, kwargs, outputs)
        return outputs

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if self.phase in ("forward", "backward"):
                self.num_host_syncs += 1
            return _imagined_number(func, args, self.phase)

    def _record(self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        assert self.attribution is not None
        self.num_host_ops += 1
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        results = list(tensors_in(outputs))
        place = self.attribution.place()
        if _is_view(func, inputs, results):
            return
        name = func._schema.name
        formula = cost.formula_for(name)
        call_cost = (
            formula(args, kwargs, outputs)
            if formula is not None
            else stream_cost(func, args, kwargs, outputs)
        )
        with self.ledger.workspace(call_cost.workspace_bytes, name, place, self.phase):
            for result in results:
                self.ledger.add(result, name, place, self.phase)
        if call_cost.num_kernels == 0:
            return
        self.ledger.call += 1
        self.calls.append(
            Call(
                lowering.plain_name(name),
                place,
                self.phase,
                tuple(TensorMeta(tuple(t.shape), t.dtype) for t in inputs),
                tuple(TensorMeta(tuple(t.shape), t.dtype) for t in results),
                call_cost,
                formula is not None or is_stream(func),
                is_strided(func, inputs, results),
                self.attribution.is_recomputing(),
            )
        )


def _needs_values(func: Any) -> BadInput:
    return BadInput(
        f"{func} makes this program depend on the values of its tensors, and nearlight looks at a "
        "step by sizes alone: let shapes depend on shapes (a mask or torch.where in place of "
        "indexing by a mask)"
    )


def cost_bytes(tensors: Any) -> int:
    """Return the bytes of distinct storages of some tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@cache
def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(
        func.name(), "CPU"
    )


def _is_view(func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    if func._schema.is_mutable or not results:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in storages for tensor in results)


def _imagined_number(func: Any, args: Any, phase: Phase) -> Any:
    """Stand in for a number that only the values would tell.

    While a model is built, 0 keeps rates such as drop path off; in an optimizer the number is
    the step count, which starts at 1.
    """
    if func is torch.ops.aten._local_scalar_dense.default:
        kind = args[0].dtype
        number = 0 if phase == "setup" else 1
        if kind == torch.bool:
            return False
        return float(number) if kind.is_floating_point else number
    if func is torch.ops.aten.equal.default:
        return True
    raise _needs_values(func)


def _describe(
    recorder: _Recorder,
    target: Target,
    optimizer: str,
    model: nn.Module,
    batch: Batch,
    updater: Any,
) -> Trace:
    state = [] if updater is None else [list(s.values()) for s in updater.state.values()]
    size = sizes(batch)
    return Trace(
        task=target.task,
        optimizer=optimizer if updater is not None else "",
        calls=tuple(recorder.calls),
        num_host_ops=recorder.num_host_ops,
        num_host_syncs=recorder.num_host_syncs,
        timeline=recorder.ledger.timeline(),
        parameter_bytes=cost_bytes(model.parameters()),
        gradient_bytes=recorder.gradient_bytes,
        optimizer_bytes=cost_bytes(tensors_in(state)),
        input_bytes=cost_bytes(batch.values()),
        num_tokens=size.num_tokens,
        num_samples=size.num_samples,
    )

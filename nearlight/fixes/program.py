"""A program that can be looked at with any set of fixes: predicted, or measured on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from nearlight.core.errors import BadInput
from nearlight.core.hardware import Gpu
from nearlight.core.report import State
from nearlight.fixes.fix import Fix
from nearlight.profiler.capture import Trace, trace
from nearlight.profiler.measure import Step, measure_state
from nearlight.profiler.predict import predict_state, step_limit
from nearlight.profiler.target import Target

# A/B blocks of a measured gain and the steps in each.
BLOCKS = 3
STEPS = 3
DEVICE = "cuda"


@dataclass(frozen=True)
class Gain:
    """What one more fix brings on top of others: time, memory, and the noise of the time."""

    ms: float
    bytes: int
    spread_ms: float


class Program(Protocol):
    """What the loop needs of a program."""

    def state(self, fixes: Sequence[Fix]) -> State:
        """Return the program's state with these fixes."""

    def traced(self, fixes: Sequence[Fix]) -> Trace:
        """Return the trace of the program with these fixes."""

    def gain(self, fixes: Sequence[Fix], fix: Fix) -> Gain:
        """Return what `fix` brings on top of `fixes`."""

    def release(self) -> None:
        """Give back the memory of gradients and optimizer state; the next look makes them anew."""

    def close(self) -> None:
        """Leave the caller's model as it was found."""


@contextmanager
def applied(model: nn.Module, fixes: Sequence[Fix]) -> Iterator[nn.Module]:
    """Apply fixes to a live model for the length of a block."""
    with ExitStack() as stack:
        for fix in fixes:
            stack.callback(fix.apply(model))
        yield model


class Predicted:
    """The program imagined on a GPU of the table, from a trace on fake tensors."""

    def __init__(self, target: Target, gpu: Gpu) -> None:
        self.target, self.gpu = target, gpu
        self._traces: dict[tuple[str, ...], Trace] = {}
        # The limit comes from the program as found and does not move when it is fixed exactly.
        self.limit_s = step_limit(self.traced([]), gpu)

    def traced(self, fixes: Sequence[Fix]) -> Trace:
        """Trace the step with these fixes, once."""
        key = tuple(fix.name for fix in fixes)
        if key not in self._traces:
            self._traces[key] = _traced(self.target, fixes)
        return self._traces[key]

    def state(self, fixes: Sequence[Fix]) -> State:
        """Predict the step with these fixes."""
        return predict_state(self.traced(fixes), self.gpu, self.limit_s)

    def gain(self, fixes: Sequence[Fix], fix: Fix) -> Gain:
        """Predict what one more fix brings; a prediction has no noise."""
        before, after = self.state(fixes), self.state([*fixes, fix])
        return Gain(before.step_ms - after.step_ms, before.peak_bytes - after.peak_bytes, 0.0)

    def release(self) -> None:
        """Nothing is held: a trace has no memory."""

    def close(self) -> None:
        """Nothing was changed: a trace works on a copy."""


def _traced(target: Target, fixes: Sequence[Fix]) -> Trace:
    def prepare(model: nn.Module) -> None:
        for fix in fixes:
            fix.apply(model)

    return trace(target, prepare=prepare)


class Measured:
    """The program on the GPU of this machine; its weights are the same afterwards.

    The optimizer runs with a learning rate of zero: every kernel of the step runs, and no
    parameter changes by a bit.
    """

    def __init__(self, target: Target, gpu: Gpu) -> None:
        self.target, self.gpu = target, gpu
        self.model = target.make_model(DEVICE)
        places = {parameter.device.type for parameter in self.model.parameters()} - {DEVICE}
        if places:
            raise BadInput(
                f"{target.name} lies on {', '.join(sorted(places))} and this machine has a GPU: "
                "move it there with model.cuda(), or give gpu=NAME to predict"
            )
        self._trace = _traced(target, [])
        self.limit_s = step_limit(self._trace, gpu)
        self._found = _Found.of(self.model)
        self.model.train(target.task == "train")
        self._step = Step(target, self.model, target.make_batch(DEVICE))

    def state(self, fixes: Sequence[Fix]) -> State:
        """Measure the step with these fixes; one that does not fit is predicted and says so."""
        with applied(self.model, fixes), suppress(torch.cuda.OutOfMemoryError):
            return measure_state(self._step, self.gpu, self.limit_s, self._trace)
        self.release()
        return self._predicted.state(fixes)

    def traced(self, fixes: Sequence[Fix]) -> Trace:
        """Trace the program with these fixes on fake tensors."""
        return _traced(self.target, fixes) if fixes else self._trace

    def gain(self, fixes: Sequence[Fix], fix: Fix) -> Gain:
        """Measure what one more fix brings: blocks of steps with and without it alternate.

        Where one of them does not fit, the gain is predicted.
        """
        with suppress(torch.cuda.OutOfMemoryError):
            return self._measured_gain(fixes, fix)
        self.release()
        return self._predicted.gain(fixes, fix)

    def _measured_gain(self, fixes: Sequence[Fix], fix: Fix) -> Gain:
        gains_ms, saved = [], 0
        for _ in range(BLOCKS):
            with applied(self.model, fixes):
                before_ms, peak_before = self._step.block(STEPS)
            with applied(self.model, [*fixes, fix]):
                after_ms, peak_after = self._step.block(STEPS)
            gains_ms.append(before_ms - after_ms)
            saved = peak_before - peak_after
        return Gain(statistics.median(gains_ms), saved, max(gains_ms) - min(gains_ms))

    @cached_property
    def _predicted(self) -> Predicted:
        return Predicted(self.target, self.gpu)

    def release(self) -> None:
        """Drop gradients and optimizer state, and give their memory back to the GPU."""
        self._step.release()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave gradients, buffers and modes of the model as they were found."""
        self.release()
        self._found.restore()


@dataclass(frozen=True)
class _Found:
    """What steps change of a model beside its parameters, which a learning rate of 0 keeps."""

    modes: list[tuple[nn.Module, bool]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]

    @classmethod
    def of(cls, model: nn.Module) -> _Found:
        """Note a model's state, and take its gradients off it."""
        found = cls(
            [(module, module.training) for module in model.modules()],
            [(buffer, buffer.detach().clone()) for buffer in model.buffers()],
            [(parameter, parameter.grad) for parameter in model.parameters()],
        )
        model.zero_grad(set_to_none=True)
        return found

    def restore(self) -> None:
        """Put everything back."""
        for module, training in self.modes:
            module.training = training
        with torch.no_grad():
            for buffer, saved in self.buffers:
                buffer.copy_(saved)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

"""What only a GPU shows: an op in a CUDA graph, on a late stream, on another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nearlight.core.errors import one_line
from nearlight.core.op import Inputs, Op
from nearlight.workbench.compare import Compared, settle
from nearlight.workbench.trial import Standard, Trial, Upstream, run, standard, tensors

# 50 ms of a GPU: longer than the host takes to enqueue forward and backward.
SLEEP_CYCLES = 100_000_000
CAPTURE = "cannot be captured"


def _blank(expected: Standard) -> tuple[Inputs, Upstream]:
    """Return memory for inputs and upstream gradients; zeros are legal labels as well."""
    inputs = {
        name: torch.zeros_like(tensor).requires_grad_(tensor.requires_grad)
        for name, tensor in tensors(expected.inputs).items()
    }
    upstream = [None if g is None else torch.zeros_like(g) for g in expected.upstream]
    return {**expected.inputs, **inputs}, upstream


def _fill(memory: tuple[Inputs, Upstream], expected: Standard) -> None:
    for name, tensor in tensors(memory[0]).items():
        tensor.detach().copy_(expected.inputs[name])
    for empty, gradient in zip(memory[1], expected.upstream, strict=True):
        if empty is not None and gradient is not None:
            empty.copy_(gradient)


def _graph(op: Op, trial: Trial, device: str) -> str:
    """Capture forward and backward in a CUDA graph, and replay it on new values."""

    def compute(trial: Trial) -> Compared | str:
        former = standard(op, replace(trial, seed=trial.seed + 101), device)
        expected = standard(op, trial, device)
        memory = _blank(former)
        _fill(memory, former)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(op.function, *memory)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                actual = run(op.function, *memory)
        except Exception as error:  # the end of a broken capture raises once more
            return f"{CAPTURE}: {one_line(error.__context__ or error)}"
        _fill(memory, expected)
        graph.replay()
        torch.cuda.synchronize()
        return Compared(actual, expected)

    with torch.cuda.device(torch.device(device)):
        reason = settle(compute, trial)
    if not reason or reason.startswith(CAPTURE):
        return reason
    return f"a replay on new values: {reason}"


def _stream(op: Op, trial: Trial, device: str) -> str:
    """Call under a side stream that is late: a kernel on another stream reads zeros."""

    def compute(trial: Trial) -> Compared:
        expected = standard(op, trial, device)
        memory = _blank(expected)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            run(op.function, expected.inputs, expected.upstream)  # compiles: it takes the host long
            torch.cuda._sleep(SLEEP_CYCLES)
            _fill(memory, expected)
            actual = run(op.function, *memory)
        side.synchronize()
        return Compared(actual, expected)

    with torch.cuda.device(torch.device(device)):
        reason = settle(compute, trial)
    return f"a kernel on another stream than the current one: {reason}" if reason else ""


def _on_device(used: int, current: int) -> Callable[[Op, Trial, str], str]:
    """Run on one GPU while another is the current one."""

    def compute(op: Op, trial: Trial) -> Compared:
        expected = standard(op, trial, f"cuda:{used}")
        return Compared(run(op.function, expected.inputs, expected.upstream), expected)

    def step(op: Op, trial: Trial, device: str) -> str:
        with torch.cuda.device(current):
            return settle(lambda again: compute(op, again), trial)

    return step


GPU_STEPS: dict[str, Callable[[Op, Trial, str], str]] = {"graph": _graph, "stream": _stream}
DEVICE_STEPS = {
    "device 1 while 0 is current": _on_device(1, 0),
    "device 0 while 1 is current": _on_device(0, 1),
}

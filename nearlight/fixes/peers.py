"""The same step under another library, measured in the same run, for honest company."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.report import State
from nearlight.core.versions import install_line
from nearlight.fixes.fix import Fix
from nearlight.fixes.program import BLOCKS, DEVICE
from nearlight.profiler.measure import MEASURED_STEPS, Step
from nearlight.profiler.target import Target, sizes


def _liger(model: nn.Module) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingPart(f"liger is not installed: {install_line('bench')}") from None
    _apply_liger_kernel_to_instance(model=model)


# Each puts a peer's kernels into a live model; some replace functions of the model's module in
# transformers as well, which stand there only while that peer is measured.
PEERS: dict[str, Callable[[nn.Module], None]] = {"liger": _liger}
OURS = "nearlight"


def check_peers(names: Sequence[str], target: Target) -> None:
    """Raise BadInput for a peer that is not known, or where it would change a live model."""
    for name in names:
        if name not in PEERS:
            raise BadInput(f"peer {name!r}: allowed are {', '.join(PEERS)}")
    if names and target.is_live:
        raise BadInput("peers change the model they are measured on: name a target, not a model")


def step_rows(
    target: Target, names: Sequence[str], fixes: Sequence[Fix], before: State
) -> list[dict[str, Any]]:
    """Measure a target's step with our fixes and under each peer, in blocks that alternate.

    Args:
        target: the program; each contender gets a fresh model.
        names: keys of `PEERS`.
        fixes: what is applied for our row.
        before: the measured step as found.

    Returns:
        A row per program: step_ms, tokens_per_s, peak_gib, and ratio = its time over ours.
    """
    contenders = [_Contender(OURS, target, lambda model: _apply(model, fixes))]
    contenders += [_Contender(name, target, PEERS[name]) for name in names]
    for _ in range(BLOCKS):
        for contender in contenders:
            contender.measure()
    measured = {"as found": (before.step_ms, before.peak_bytes)}
    measured |= {c.name: (median(c.times_ms), c.peak_bytes) for c in contenders}
    ours_ms = measured[OURS][0]
    tokens = sizes(target.make_batch("cpu")).num_tokens
    return [
        {
            "program": name,
            "step_ms": step_ms,
            "tokens_per_s": None if tokens is None else tokens / step_ms * 1e3,
            "peak_gib": peak_bytes / 2**30,
            "ratio": step_ms / ours_ms,
        }
        for name, (step_ms, peak_bytes) in measured.items()
    ]


def _apply(model: nn.Module, fixes: Sequence[Fix]) -> None:
    for fix in fixes:
        fix.apply(model)


class _Contender:
    """A fresh model with one set of kernels, on the GPU only while it is measured."""

    def __init__(self, name: str, target: Target, change: Callable[[nn.Module], None]) -> None:
        self.name, self.target = name, target
        self.times_ms: list[float] = []
        self.peak_bytes = 0
        self._model = target.make_model(DEVICE).train(target.task == "train")
        self._home = vars(sys.modules[type(self._model).__module__])
        found = dict(self._home)
        change(self._model)
        self._replaced = {k: v for k, v in self._home.items() if v is not found.get(k)}
        self._found = {k: found[k] for k in self._replaced if k in found}
        self._leave()

    def measure(self) -> None:
        """Run one block of steps as a program of its own would: nothing else on the GPU."""
        self._home.update(self._replaced)
        try:
            self._model.to(DEVICE)
            step = Step(self.target, self._model, self.target.make_batch(DEVICE))
            time_ms, self.peak_bytes = step.block(MEASURED_STEPS)
            self.times_ms.append(time_ms)
            step.release()
        finally:
            self._leave()

    def _leave(self) -> None:
        for name in self._replaced:
            del self._home[name]
        self._home.update(self._found)
        self._model.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()

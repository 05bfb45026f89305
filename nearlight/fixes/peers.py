"""The same step under another library, measured in the same run, for honest company."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.report import State
from nearlight.profiler.measure import MEASURED_STEPS, Step
from nearlight.profiler.target import Target, sizes


def _liger(model: nn.Module) -> None:
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingPart("liger is not installed: pip install 'nearlight[bench]'") from None
    _apply_liger_kernel_to_instance(model=model)


# Each puts a peer's kernels into a live model. Some replace functions of transformers for the
# whole process, which is why peers are measured last.
PEERS: dict[str, Callable[[nn.Module], None]] = {"liger": _liger}


@dataclass(frozen=True)
class _Measured:
    step_ms: float
    peak_bytes: int


def check_peers(names: Sequence[str], target: Target) -> None:
    """Raise BadInput for a peer that is not known, or where it would change a live model."""
    for name in names:
        if name not in PEERS:
            raise BadInput(f"peer {name!r}: allowed are {', '.join(PEERS)}")
    if names and target.is_live:
        raise BadInput("peers change the model they are measured on: name a target, not a model")


def step_rows(
    target: Target, names: Sequence[str], before: State, after: State
) -> list[dict[str, Any]]:
    """Measure a target's step under each peer, and put it beside what was found and ours.

    Args:
        target: the program; a fresh model is made for each peer.
        names: keys of `PEERS`.
        before: the measured step as found.
        after: the measured step with our fixes.

    Returns:
        A row per program: step_ms, tokens_per_s, peak_gib, and ratio = its time over ours.
    """
    states = {"as found": before, "nearlight": after}
    measured = {name: _Measured(s.step_ms, s.peak_bytes) for name, s in states.items()}
    for name in names:
        model = target.make_model("cuda")
        PEERS[name](model)
        step = Step(target, model, target.make_batch("cuda"))
        measured[name] = _Measured(*step.block(MEASURED_STEPS))
        step.release()
        del model, step
        gc.collect()
        torch.cuda.empty_cache()
    tokens = sizes(target.make_batch("cpu")).num_tokens
    return [
        {
            "program": name,
            "step_ms": one.step_ms,
            "tokens_per_s": None if tokens is None else tokens / one.step_ms * 1e3,
            "peak_gib": one.peak_bytes / 2**30,
            "ratio": one.step_ms / after.step_ms,
        }
        for name, one in measured.items()
    ]

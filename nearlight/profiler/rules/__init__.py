"""One file per finding: evidence, cause, fix and predicted gain of what slows a step down.

Each file has a pure function `find(trace, state, gpu) -> Finding | None`.
"""

from __future__ import annotations

from collections.abc import Iterable

from nearlight.core.hardware import Gpu
from nearlight.core.report import Finding, State
from nearlight.profiler.capture import Trace
from nearlight.profiler.rules import (
    activation_memory,
    attention_backend,
    does_not_fit,
    dtype_round_trips,
    fp32_matmul,
    host_bound,
    host_syncs,
    materialised_logits,
    optimizer_loop,
    residual_add,
    small_kernels,
    unfused_activation,
    unfused_norm,
    unfused_rope,
)

RULES = (
    does_not_fit,
    materialised_logits,
    unfused_norm,
    unfused_activation,
    unfused_rope,
    attention_backend,
    activation_memory,
    optimizer_loop,
    residual_add,
    dtype_round_trips,
    fp32_matmul,
    host_bound,
    host_syncs,
    small_kernels,
)


def find(trace: Trace, state: State, gpu: Gpu) -> list[Finding]:
    """Return all findings of a step; what does not fit comes first, then the largest gain.

    Args:
        trace: of the program as found.
        state: its predicted or measured state; measured times replace predicted ones.
        gpu: the GPU of the state.
    """
    found = [rule.find(trace, state, gpu) for rule in RULES]
    findings = [finding for finding in found if finding is not None]
    return ordered(findings)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings: what does not fit first, then the largest gain."""
    return sorted(findings, key=lambda f: (not is_blocking(f), -f.gain_ms, -f.gain_bytes))


def is_blocking(finding: Finding) -> bool:
    """Say whether a finding is that the program does not fit on its GPU."""
    return finding.title.startswith(does_not_fit.TITLE)

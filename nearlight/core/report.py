"""Figures, findings and reports: one contract for every verb, as objects and as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearlight.core.errors import BadInput

SCHEMA = 1
Kind = Literal["measured", "predicted", "derived", "datasheet"]
Mode = Literal["measured", "predicted"]


@dataclass(frozen=True)
class Figure:
    """A number that says what it is.

    Attributes:
        value: the number.
        unit: "ms", "bytes", "tokens/s", ...
        kind: how it came about.
        source: what measured or computed it.
        low: lower end of the interval, where the number is not exact. A predicted time's
            interval is that of the whole step: its ops err more, up and down, and have none.
        high: upper end.
    """

    value: float
    unit: str
    kind: Kind
    source: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError("a Figure has both ends of an interval or none")
        if self.low is not None and not self.low <= self.value <= (self.high or 0.0):
            raise ValueError(f"{self.value} {self.unit} is outside [{self.low}, {self.high}]")


@dataclass(frozen=True)
class OpRow:
    """All calls of one op in one module during a step.

    Attributes:
        name: torch's name of the op.
        module: qualified name of the module that called it ("" for none, e.g. the optimizer).
        calls: number of calls in a step.
        time_ms: device time of all calls.
        limit_ms: sum of the calls' limits.
        share: limit over time.
        bound: memory, compute, latency, launch, L2, communication, idle, or unmodelled where
            nothing is known of what the op must do.
        flops: operations of all calls, all pipes.
        bytes: fewest bytes of all calls.
        remark: why there is no share, where one was expected.
    """

    name: str
    module: str
    calls: int
    time_ms: float
    limit_ms: float
    share: float | None
    bound: str
    flops: int
    bytes: int
    remark: str = ""


@dataclass(frozen=True)
class State:
    """A program as it stands: before or after the fixes.

    Attributes:
        mode: measured or predicted.
        step_ms: time of one step.
        tokens_per_s: None where the batch has no tokens.
        samples_per_s: sequences or images per second.
        peak_bytes: peak of allocated device memory.
        limit_ms: limit of the step, from the program as found.
        share: limit_ms over step_ms.
        ops: rows, slowest first.
        memory: bytes at the peak by owner (parameters, gradients, optimizer, activations,
            temporaries, inputs).
        peak_tensors: what makes the peak: rows with name, module, shape, dtype, bytes, owner.
        figures: the named numbers again, with unit, kind, source and interval; beside them
            `unmodelled_ms`, the time of ops that have no cost model.
        pipe: the pipe (a key of `Gpu.peaks_tflops`) that does most of the flops, "" for none.
    """

    mode: Mode
    step_ms: float
    tokens_per_s: float | None
    samples_per_s: float | None
    peak_bytes: int
    limit_ms: float
    share: float
    ops: Sequence[OpRow] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    peak_tensors: Sequence[Mapping[str, Any]] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    pipe: str = ""


@dataclass(frozen=True)
class Finding:
    """Evidence, cause, fix and gain; largest gain first in every report.

    Attributes:
        title: one line.
        evidence: the numbers that show it.
        cause: why it is so.
        fix: name of the fix ("patch:rms_norm"), or "" where nothing is applied for the user.
        gain_ms: predicted gain of a step.
        gain_bytes: predicted gain of peak memory.
        applied: whether the fix stands at the end.
        note: what came of it (realised gain, or why it was undone or not tried).
        next_step: what the user does with it.
    """

    title: str
    evidence: str
    cause: str
    fix: str
    gain_ms: float
    gain_bytes: int
    applied: bool = False
    note: str = ""
    next_step: str = ""


@dataclass(frozen=True)
class Proof:
    """Whether a change kept the results: the verdict and a row per quantity compared."""

    passed: bool
    rows: Sequence[Mapping[str, Any]]
    method: str = ""
    is_partial: bool = False  # nothing failed, but not all of it could be run here

    @property
    def verdict(self) -> str:
        """Passed, failed or incomplete, as one word."""
        return "incomplete" if self.is_partial else "passed" if self.passed else "failed"


@dataclass(frozen=True, repr=False)
class Report:
    """What a verb answers, as data; drawing it is somebody else's work.

    Attributes:
        verb: optimize, predict, bench, ...
        answer: the first line of any output.
        target: what the user named.
        task: train, prefill, decode or "".
        gpu: key of the GPU table.
        setup: defaults that were used, one line ("bf16, fused AdamW, ...").
        versions: versions of what the numbers depend on.
        before, after, findings, proof: parts that a verb fills or leaves None/empty.
        rows: table of verbs that answer with one (bench, ops, doctor).
        next: the last line of any output, the next step.
    """

    verb: str
    answer: str
    target: str = ""
    task: str = ""
    gpu: str = ""
    setup: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    before: State | None = None
    after: State | None = None
    findings: Sequence[Finding] = ()
    proof: Proof | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    next: str = ""

    @property
    def mode(self) -> Mode | None:
        """The mode of `after`, or of `before` where there is no after."""
        state = self.after or self.before
        return state.mode if state else None

    def __repr__(self) -> str:
        return f"Report({self.verb}: {self.answer})"

    def __str__(self) -> str:
        """Return the answer, what was found and what came of it, and the next step, as text."""
        lines = [self.answer, self.setup]
        for number, finding in enumerate(self.findings, 1):
            state = "applied" if finding.applied else "open"
            lines.append(f"{number}. {finding.title} ({state}): {finding.evidence}")
            lines.append(f"   {finding.note or finding.next_step}".rstrip())
        if self.proof:
            lines.append(f"proof {self.proof.verdict}: {self.proof.method}")
        return "\n".join(line for line in (*lines, self.next) if line)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: plain dicts, lists, numbers and strings."""
        return {"schema": SCHEMA, "mode": self.mode, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save_json(self, path: str | Path) -> None:
        """Write the report as JSON; aside first, then renamed, so that no half file stays."""
        write_aside(path, self.to_json() + "\n")


def gib(num_bytes: float) -> str:
    """Return bytes as text in GiB, or in MiB below one."""
    if abs(num_bytes) >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def require_writable(path: str | Path, makes_folders: bool = True) -> None:
    """Raise BadInput unless a file can be written at `path`; leaves nothing behind.

    Called before minutes of work, whose result would be lost after them.

    Args:
        path: of the file.
        makes_folders: whether folders that are missing will be made; those of a path that the
            user types are not, for one may be a slip.
    """
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"{path} is a folder; name a file for the report")
    if target.exists() and not target.is_file():
        raise BadInput(f"{path} is no ordinary file; name a file for the report")
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if folder.is_dir() and folder != target.absolute().parent and not makes_folders:
        raise BadInput(
            f"{path} cannot be written: there is no folder {target.parent}; make it first, or "
            "name a file in one that is there"
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {folder}: {error.strerror}") from None


def write_aside(path: str | Path, content: str | bytes) -> None:
    """Write text or bytes to a temporary file in the same folder and rename it into place.

    A link stays a link: the file that it names is replaced. What is there and no ordinary file (a
    device, a pipe) must not be replaced at all; it raises OSError.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is no ordinary file")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

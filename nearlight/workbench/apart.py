"""`check_apart`: an op is proved in a process of its own, whose death or hang is a finding.

The child announces each input before it runs it, as JSON lines on a pipe of its own; what the op
prints goes to stderr. This side loads neither torch nor the user's file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.progress import Progress, show_current, silent
from nearlight.core.report import Report
from nearlight.core.user_code import added_folders
from nearlight.workbench.check_report import Header, Row, as_report, first_of_cause
from nearlight.workbench.ending import Ending, ending_of, hung, place_in

CHILD = "nearlight.workbench.child"
# Until the op is loaded: torch, triton, the user's file and all that it imports.
START_SECONDS = 300.0
# How long a trial may take once one has hung.
AFTER_HANG_SECONDS = 10.0
# What one trial may take on top: a compiler is at work, or a tool with a time limit of its own.
EXTRA_SECONDS = {"torch": 120.0, "machine code": 300.0, "sanitizer": 300.0}
EXTRA_SECONDS_ON_GPU = 60.0
# What ends here was not a write beyond a tensor: guard zones would have taken that.
GUARDED = ("values", "layouts", "shapes", "extremes", "poison")
# What ends here may have been one: these take a case as it lies in memory.
UNGUARDED = ("lifecycle", "torch", "memory")
# The inputs that end a process are made smaller in no more time than this.
SMALLER_SECONDS = 60.0
_POLL_SECONDS = 0.25
_ERRORS = {error.__name__: error for error in (BadInput, MissingPart)}
# Set in the child: a file that checks itself while it is imported would never come to an end.
is_child = False


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether the user stops the work; no terminal's key reaches the child of a check."""
    return isinstance(error, KeyboardInterrupt) and not is_child


@dataclass(frozen=True)
class _Limits:
    start_seconds: float
    trial_seconds: float
    device: str
    has_hung: bool = False

    def of(self, prop: str) -> float:
        """Return how long one trial of a property may be silent."""
        on_gpu = EXTRA_SECONDS_ON_GPU if self.device != "cpu" else 0.0
        extra = EXTRA_SECONDS.get(prop, 0.0) + on_gpu
        if self.has_hung:  # what hangs once hangs again
            return min(self.trial_seconds, AFTER_HANG_SECONDS) + extra / 10
        return self.trial_seconds + extra


@dataclass
class _Smaller:
    """An input that ended a process, while it is made smaller: each that ends one takes a child.

    Attributes:
        prop: the property that it broke.
        first: what runs the first such input again.
        line, mark, ending: of the smallest so far.
        tried: what ran the smaller inputs that need not run again.
        may_stray: whether to ask first if it writes beyond a tensor.
        strays: whether it does; then it is not made smaller.
    """

    prop: str
    first: str
    line: str
    mark: Mapping[str, Any]
    ending: Ending
    tried: list[str] = field(default_factory=list)
    may_stray: bool = False
    strays: bool = False

    def asked(self) -> dict[str, Any]:
        asked = {"line": self.first, "sizes": self.mark["shape"], "tried": self.tried}
        return {"prop": self.prop, **asked, "may_stray": self.may_stray and not self.tried}


@dataclass
class _Told:
    """What the children of one check have told so far.

    Attributes:
        header: of the report; None until a child has loaded the op.
        names: number of each property to prove, by name.
        rows: the rows so far, by property.
        current: the property at work.
        line: what runs the input again that was announced last.
        mark: what makes that input; empty while inputs are chosen.
        ended: the inputs that have ended a process, by property.
        fatal: those that do so wherever they run, with the row of the first that met them.
        smaller: the one that is being made smaller.
        known: the smallest input known to break the property, and how.
        num_trials: inputs of this property announced so far.
        start: when the property began.
        sources, machine_code: parts of a record, where one is asked for.
        is_done: whether all was told.
    """

    progress: Progress
    header: Header | None = None
    names: dict[str, int] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    current: str = ""
    line: str = ""
    mark: Mapping[str, Any] = field(default_factory=dict)
    ended: dict[str, _Smaller] = field(default_factory=dict)
    fatal: list[Mapping[str, Any]] = field(default_factory=list)
    smaller: _Smaller | None = None
    known: tuple[str, str] | None = None
    num_trials: int = 0
    start: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    machine_code: Mapping[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def begin(self, prop: str) -> None:
        self.current, self.line, self.known, self.num_trials = prop, "", None, -1
        self.start, self.mark = time.monotonic(), {}
        if prop and self.header is not None:
            show_current(self.progress, f"{self.header.op} {prop}")

    def add(self, row: Row) -> None:
        assert self.header is not None
        self.rows[row.property] = row
        self.progress(f"{self.header.op} {row}")
        self.begin(next((name for name in self.names if name not in self.rows), ""))

    def take(self, message: Mapping[str, Any]) -> None:
        """Take one line of a child."""
        match message:
            case {"error": [name, text]}:
                raise _ERRORS[name](text)
            case {"header": header, "names": names, "sources": sources}:
                if self.header is None:
                    self.header, self.names, self.sources = Header(**header), names, sources
                left = (name for name in self.names if name not in self.rows)
                self.begin(self.smaller.prop if self.smaller else next(left, ""))
            case {"line": line, "reason": "", "mark": mark}:
                self.line, self.mark = line, mark
                self.num_trials += 1  # the first is how the inputs are chosen
                if self.smaller is not None:
                    self.smaller.tried.append(line)
            case {"strays": strays}:
                assert self.smaller is not None
                self.smaller.strays, self.is_done = strays, True
            case {"line": line, "reason": reason}:
                self.known = (line, reason)
            case {"row": row}:
                self.add(Row(**row))
            case {"machine_code": code, "done": done}:
                self.machine_code, self.is_done = code, done

    def lose(self, ending: Ending) -> None:
        """Add the row of the property that a child did not live to finish."""
        line, reason, cause = self.line, str(ending), ending.cause(self.mark)
        if self.known is not None:
            line, reason = self.known[0], f"{self.known[1]} (a smaller input: {ending})"
            cause = ""
        elif not self.num_trials:
            reason = f"{ending} while inputs were chosen"
        else:
            self.ended[self.current] = _Smaller(self.current, line, line, self.mark, ending)
            if self.current in GUARDED:
                fatal = {"mark": self.mark, "reason": reason, "cause": cause, "line": line}
                self.fatal.append(fatal)
        seconds = round(time.monotonic() - self.start, 3)
        number, tried = self.names[self.current], max(self.num_trials, 0)
        self.add(Row(number, self.current, "failed", tried, reason, line, seconds, cause=cause))


@dataclass(frozen=True)
class Found:
    """A check in children and, where they were asked for, the parts of its record."""

    report: Report
    sources: Mapping[str, str]
    machine_code: Mapping[str, Any]


def check_apart(
    name: str,
    quick: bool = False,
    device: str = "cpu",
    only: Sequence[str] | None = None,
    *,
    trial_seconds: float = 60.0,
    start_seconds: float = START_SECONDS,
    sanitize: bool = False,
    progress: Progress = silent,
) -> Report:
    """Prove an op in a child process; a crash or a hang is a failed property with its input.

    Args:
        name: an op of nearlight, "my_op.py" (its `OP`) or "my_op.py:NAME".
        quick: prove values, gradients, one layout of each family and guard zones alone.
        device: "cpu" or "cuda".
        only: names of the properties to prove; by default all.
        trial_seconds: how long one input may take; more where a compiler is at work.
        start_seconds: how long the op's file may take to import.
        sanitize: prove the property "sanitizer", too.
        progress: called with a line when a property is done.

    Returns:
        A report with one row per property; `report.proof.verdict` is passed, failed or
            incomplete.

    Raises:
        BadInput: no such op, property or device; a file that does not import; source that runs on
            no input, with the compiler's own lines.
        MissingPart: the device is cuda and there is no GPU.

    Example:
        >>> from nearlight.workbench.apart import check_apart
        >>> print(check_apart("rms_norm", quick=True).answer)  # doctest: +SKIP
        rms_norm: 3 of 3 properties hold
    """
    request = {"quick": quick, "device": device, "only": only, "sanitize": sanitize}
    limits = _Limits(start_seconds, trial_seconds, device)
    return _run(name, request, limits, progress).report


def prove_apart(name: str, progress: Progress = silent) -> Found:
    """Run the full check of an op in a child, which compiles its kernels for each arch as well."""
    request = {"quick": False, "device": "cpu", "only": None, "sanitize": False}
    limits = _Limits(START_SECONDS, 60.0, "cpu")
    return _run(name, {**request, "for_record": True}, limits, progress)


def _run(name: str, request: Mapping[str, Any], limits: _Limits, progress: Progress) -> Found:
    """Start a child, and another for the rest whenever one is lost."""
    if is_child:
        raise BadInput(
            f"{name} is checked while a check imports it; in its own file put the call below "
            "`if __name__ == '__main__':`"
        )
    request = {**request, "name": name, "parent": os.getpid()}
    told = _Told(progress)
    show_current(progress, f"{name}: it is imported")
    killed: set[str] = set()
    while not told.is_done:
        ending = _run_child(request, told, limits)
        if ending is None:
            break
        if ending.is_from_outside:
            if told.current not in killed:  # before an op is blamed
                killed.add(told.current)
                progress(f"{name} {told.current}: {ending}, a second attempt")
                continue
            twice = f"{ending.what} in two attempts; that is sent from outside: out of memory?"
            ending = replace(ending, what=twice)
        if told.header is None:
            raise BadInput(f"{name}: {ending} while it was imported")
        if not told.current:
            raise BadInput(f"{name}: {ending} while its kernels were compiled for the record")
        told.lose(ending)
        limits = replace(limits, has_hung=limits.has_hung or ending.seconds > 0)
        told.is_done = not told.current and not request.get("for_record")
    _make_smaller(request, told, limits)
    assert told.header is not None
    rows = sorted(told.rows.values(), key=lambda row: row.number)
    return Found(as_report(told.header, rows), told.sources, told.machine_code)


def _make_smaller(request: Mapping[str, Any], told: _Told, limits: _Limits) -> None:
    """Make the inputs smaller that ended a process and have a cause of their own."""
    end = time.monotonic() + SMALLER_SECONDS
    failed = {row.property: row for row in told.rows.values() if row.status == "failed"}
    first = first_of_cause([*failed.values()])
    for prop, found in told.ended.items():
        if first[prop] != prop or found.ending.is_from_outside:
            continue
        saw_stray = "poison" in failed and "poison" not in told.ended
        found.may_stray = prop in UNGUARDED and saw_stray and found.ending.is_of_memory
        told.smaller, told.is_done, is_alive = found, False, True
        while is_alive and not told.is_done and time.monotonic() < end:
            ending = _run_child(request, told, limits)
            if ending is None:
                break
            is_alive = bool(told.mark)  # else it ended while inputs were chosen
            if is_alive and ending.what == found.ending.what:
                found.line, found.mark, found.ending = told.line, told.mark, ending
        reason = str(found.ending)
        if not is_alive:
            reason += f"; not made smaller: {ending} while inputs were chosen"
        elif not told.is_done:
            reason += f"; made smaller for {SMALLER_SECONDS:.0f} s, not to the end"
        named_by = "poison" if found.strays else ""
        row = replace(told.rows[prop], reason=reason, reproduce=found.line, named_by=named_by)
        told.rows[prop] = row


def _run_child(request: Mapping[str, Any], told: _Told, limits: _Limits) -> Ending | None:
    """Hear a child to its end; return how it ended, None where it told all."""
    request = {**request, "done": list(told.rows), "fatal": told.fatal}
    request["smaller"] = told.smaller and told.smaller.asked()
    read, write = os.pipe()
    # The child imports what this process would: -P keeps the working folder out of it. What lies
    # beside other loaded files is none of its op's neighbours.
    entries = [entry or str(Path.cwd()) for entry in sys.path if entry not in added_folders]
    path = os.pathsep.join(entries)
    with tempfile.TemporaryFile() as trace:
        files = (write, trace.fileno())
        command = [sys.executable, "-P", "-u", "-m", CHILD, *map(str, files)]
        child = subprocess.Popen(
            [*command, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is the report's
            pass_fds=files,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(write)
        try:
            ending = _listen(child, read, told, limits)
            trace.seek(0)
            place = place_in(trace.read().decode(errors="replace"))
            return ending and replace(ending, place=place)
        finally:
            os.close(read)
            _end(child)


def _listen(
    child: subprocess.Popen[bytes], read: int, told: _Told, limits: _Limits
) -> Ending | None:
    limit = limits.start_seconds
    deadline = time.monotonic() + limit
    rest, is_open = b"", True
    while (left := deadline - time.monotonic()) > 0:
        slice_seconds = min(left, _POLL_SECONDS)
        if is_open and select.select([read], [], [], slice_seconds)[0]:
            chunk = os.read(read, 1 << 16)
            is_open = bool(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                told.take(json.loads(line))
                limit = limits.of(told.current or "machine code")
                deadline = time.monotonic() + limit
            if told.is_done:
                return None
            continue
        try:
            return ending_of(child.wait(0 if is_open else slice_seconds))
        except subprocess.TimeoutExpired:
            continue
    child.send_signal(signal.SIGABRT)  # the child writes down where it is
    try:
        child.wait(1.0)
    except subprocess.TimeoutExpired:
        pass  # `_end` is not so polite
    return hung(limit)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all that it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing of it is left
    child.wait()

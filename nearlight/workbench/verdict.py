"""One property of one op: tried up to the first input that breaks it, which is made smaller."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nearlight.core.cuda import NoEmulator
from nearlight.core.op import Case, Op
from nearlight.workbench.apart import is_ctrl_c
from nearlight.workbench.bad_source import COMPILE_ERRORS, BadSource, refuse_builds, refuse_launch
from nearlight.workbench.check_report import NOT_APPLICABLE, ON_A_GPU, Row
from nearlight.workbench.compare import Leniency, noting
from nearlight.workbench.fatal import IsFatal, mark, refuse_fatal
from nearlight.workbench.launches import Launches, launches
from nearlight.workbench.load import source_of
from nearlight.workbench.properties.poison import written_beyond
from nearlight.workbench.properties.values import PROPERTY as VALUES
from nearlight.workbench.property import (
    NeedsGpu,
    NotApplicable,
    Property,
    Remarks,
    case_size,
    remark_texts,
    remarked,
)
from nearlight.workbench.raised import at, describe
from nearlight.workbench.settings import restored
from nearlight.workbench.trial import Refused, Rejected, Trial

# Steps tried to make a failing input smaller.
MAX_SHRINK_STEPS = 16
# A row that stands on no more cases than these names them.
MAX_NAMED_CASES = 4
RAISED = "raised"
CHOSEN = ", while inputs were chosen"
# Their trials run no case in this process, but read what is compiled or have it run elsewhere.
NEVER_FATAL = ("size", "determinism", "sanitizer", "machine code")

# `(line, reason, mark)`: told before an input is run, with the line that runs it again; with a
# reason where it is known to break the property, without a mark while inputs are chosen.
Announce = Callable[[str, str, Mapping[str, Any]], None]


def unheard(line: str, reason: str, mark: Mapping[str, Any]) -> None:
    """Tell nobody; what runs in this process needs no witness."""


@dataclass(frozen=True)
class _Verdict:
    status: str
    num_trials: int
    reason: str
    line: str = ""
    cause: str = ""


@dataclass(frozen=True)
class _Subject:
    """A property of an op on a device, and what its kernels were seen to do."""

    prop: Property
    op: Op
    device: str
    seen: Launches
    announce: Announce
    source: str

    def examine(self, trial: Trial) -> str | Rejected:
        """Return what `examine` says; NoEmulator where a kernel could not run, even if caught."""
        if self.announce is not unheard:
            self.announce(self.line(trial), "", mark(trial))
        if self.prop.name not in NEVER_FATAL:
            refuse_fatal(trial)
        self.seen.not_run, self.seen.failed = "", None
        outcome = examine(self.prop, self.op, trial, self.device)
        if outcome or self.seen.not_run:
            self.refuse_bad_source()
        if self.seen.not_run:
            raise NoEmulator(self.seen.not_run)
        return outcome

    def refuse_bad_source(self) -> None:
        """Raise BadSource where a kernel failed that no input can run."""
        if self.seen.failed is not None:
            refuse_launch(*self.seen.failed)

    def cause(self, trial: Trial, reason: str) -> str:
        """Return what is wrong: with the values, if they are as wrong on the same input alone."""
        if self.prop is VALUES:
            return _kind(reason)
        if trial.size > max(map(case_size, self.op.check_cases)):  # no memory need hold its values
            return reason
        alone = replace(trial, layouts={}, step="")
        wrong = _kind(str(examine(VALUES, self.op, alone, self.device)))
        # An error is the same where another place of the check has met it.
        error = wrong.removeprefix(f"{RAISED} ").partition(" at ")[0] if RAISED in wrong else wrong
        texts = reason, _kind(reason), _without_numbers(reason)
        return wrong if wrong and any(error in text for text in texts) else reason

    def line(self, trial: Trial) -> str:
        """Return one line of Python that shows the failure again."""
        case, default = trial.case, vars(Trial(trial.case))
        fields = {k: v for k, v in vars(trial).items() if k == "seed" or v != default[k]}
        sizes = (repr(dict(case.shape)), str(case.dtype))
        return self.call("reproduce", *sizes, options=case.options or None, **fields)

    def call(self, function: str, *arguments: str, **options: Any) -> str:
        """Return a line of Python that calls a function of `check.py` on the property."""
        options["device"] = None if self.device == "cpu" else self.device
        given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        source = repr(self.source) if self.source else "op"
        call = ", ".join((source, repr(self.prop.name), *arguments, *given))
        imports = f"import torch; from nearlight.workbench.check import {function}"
        if re.search(r"\b(inf|nan)\b", call):  # as `repr` writes them
            imports = f"from math import inf, nan; {imports}"
        # No file holds this record: only who has made it can call it by a name.
        whose = "" if self.source else f"  # op: the Op called {self.op.name}"
        return f"{imports}; {function}({call}){whose}"


@contextmanager
def _subject(prop: Property, op: Op, device: str, announce: Announce) -> Iterator[_Subject]:
    """Look at what kernels do inside the block, and put settings back after it."""
    with launches() as seen, restored():
        source = source_of(op).removeprefix(f"{Path.cwd()}/")  # it shall work where it is printed
        yield _Subject(prop, op, device, seen, announce, source)


def prove_property(
    prop: Property, op: Op, quick: bool, device: str, announce: Announce = unheard
) -> Row:
    """Try a property on its trials, smallest first, up to the first that breaks it."""
    start = time.perf_counter()
    with _subject(prop, op, device, announce) as subject:
        needs_gpu = False
        try:
            found = _judge(subject, quick)
        except NotApplicable as answer:
            found = _Verdict(NOT_APPLICABLE, 0, str(answer))
            needs_gpu = isinstance(answer, NeedsGpu)
        except NoEmulator:
            found, needs_gpu = _Verdict(NOT_APPLICABLE, 0, ON_A_GPU), True
    seconds = round(time.perf_counter() - start, 3)
    seen = subject.seen
    kernels, compiled = sorted(seen.started), sorted({name for name, _ in seen} - seen.started)
    return Row(
        prop.number, prop.name, found.status, found.num_trials, found.reason, found.line,
        seconds, kernels, compiled, needs_gpu, found.cause,
    )  # fmt: skip


def _judge(subject: _Subject, quick: bool) -> _Verdict:
    prop, op, device = subject.prop, subject.op, subject.device
    whole_line = subject.call("reproduce_property", quick=quick or None)
    subject.announce(whole_line, "", {})
    try:
        trials = sorted(prop.trials(op, quick, device), key=lambda trial: trial.size)
    except IsFatal as known:
        return _ended(known, 0)
    except (NotApplicable, BadSource):
        raise
    except BaseException as error:  # whatever an op raises here is the finding
        if is_ctrl_c(error):
            raise
        subject.refuse_bad_source()
        if subject.seen.not_run:
            raise NoEmulator(subject.seen.not_run) from error
        reason, cause = _told(error, op, device)
        return _Verdict("failed", 0, f"{reason}{CHOSEN}", whole_line, cause)
    if not trials:
        return _Verdict(NOT_APPLICABLE, 0, "the cases have no size, layout or value to change")
    listed = [*op.check_cases, *(extreme.case for extreme in op.extremes)]
    tried: list[Case] = []
    granted, refusals, noted = Leniency(), [], Remarks()
    rejection = ""
    for trial in trials:
        try:
            with noting(granted), remarked(noted):
                outcome = subject.examine(trial)
        except IsFatal as known:
            return _ended(known, len(tried))
        if isinstance(outcome, Rejected):
            rejection, cause = _told(outcome, op, device)
            if isinstance(outcome, Refused):
                refusals.append(str(outcome))
            elif trial.case in listed and not trial.layouts:
                return _Verdict("failed", len(tried), rejection, subject.line(trial), cause)
            continue
        tried.append(trial.case)
        if outcome:
            smallest, reason = _shrink(subject, trial, outcome)
            cause = subject.cause(smallest, reason)
            return _Verdict("failed", len(tried), reason, subject.line(smallest), cause)
    if not tried:
        reason = f"no input could be made: {rejection}"
        return _Verdict("failed", 0, reason, whole_line)
    remarks = _remarks(tried, remark_texts(noted), refusals, granted)
    return _Verdict("passed", len(tried), "; ".join(remarks))


def _ended(known: IsFatal, num_tried: int) -> _Verdict:
    fatal = known.fatal
    return _Verdict("failed", num_tried, fatal.reason, fatal.line, fatal.cause)


def _remarks(
    tried: Sequence[Case], noted: Sequence[str], refusals: Sequence[str], granted: Leniency
) -> list[str]:
    remarks = [f"refuses {refusals[0]}"] if refusals else []
    if len(refusals) > 1:
        remarks.append(f"and {len(refusals) - 1} more inputs")
    remarks += granted.remarks()
    cases = list(dict.fromkeys(map(_case_text, tried)))
    if noted:
        remarks = [*noted, *remarks]
    elif len(cases) <= MAX_NAMED_CASES:
        remarks.insert(0, f"on {'; '.join(cases)}")
    return remarks


def _case_text(case: Case) -> str:
    """Return "rows 3 × columns 5 in bfloat16, casting=llama"."""
    sizes = " × ".join(f"{name} {size}" for name, size in case.shape.items())
    options = "".join(f", {name}={value}" for name, value in case.options.items())
    return f"{sizes or 'no sizes'} in {str(case.dtype).removeprefix('torch.')}{options}"


def examine(prop: Property, op: Op, trial: Trial, device: str) -> str | Rejected:
    """Return how the property is broken, "" if it holds, or why there is no such input."""
    try:
        with restored():  # or what one call leaves set would look untouched to the next trial
            return prop.examine(op, trial, device)
    except Rejected as rejected:
        return rejected
    except BadSource:
        raise
    except BaseException as error:  # whatever an op raises is the finding
        if is_ctrl_c(error):
            raise
        if isinstance(error, COMPILE_ERRORS):
            refuse_builds(op)
        return f"{RAISED} {describe(error, op, device)}"


def _told(error: BaseException, op: Op, device: str) -> tuple[str, str]:
    """Return what an error says of an op, and its cause: that of a rejection is what it hides."""
    inner = error.__cause__
    if isinstance(inner, StopIteration) and str(error) == "generator raised StopIteration":
        error = inner  # what the op raised came through a generator of ours
    if not isinstance(error, Rejected):
        reason = f"{RAISED} {describe(error, op, device)}"
        return reason, _kind(reason)
    cause = f"{RAISED} {describe(inner, op, device)}" if inner else str(error)
    return f"{error}{at(inner or error)}", _kind(cause)


def _kind(reason: str) -> str:
    """Return what a reason says without its numbers: which result is wrong, or what was raised."""
    if reason.startswith(RAISED):  # the line where it was stays
        return _without_numbers(reason)
    kind = re.sub(r"^((?:.*?: )?\D*).*", r"\1", reason, flags=re.DOTALL)
    return kind or _without_numbers(reason)  # "2 outputs, ..."


def _without_numbers(reason: str) -> str:
    return re.sub(r"(?<![:\w])\d[\d.e+-]*", "#", reason)


def _broken(reason: str) -> str:
    """Return what a reason says is broken: a result, or the error that was raised."""
    return re.sub(r"\d+", "#", reason.partition(": ")[0])


def _shrink(subject: _Subject, trial: Trial, reason: str) -> tuple[Trial, str]:
    """Make a failing trial smaller as long as it fails, one size at a time."""
    tried: list[str] = []
    is_smaller = True
    while is_smaller:
        is_smaller = False
        subject.announce(subject.line(trial), reason, mark(trial))
        for candidate, line in _smaller(subject, trial, tried):
            if len(tried) >= MAX_SHRINK_STEPS:
                break
            tried.append(line)
            outcome = subject.examine(candidate)
            # An error of a size too small, or another result, is another thing.
            if isinstance(outcome, str) and _broken(outcome) == _broken(reason):
                trial, reason, is_smaller = candidate, outcome, True
                break
    return trial, reason


def _smaller(
    subject: _Subject, trial: Trial, tried: Collection[str]
) -> Iterator[tuple[Trial, str]]:
    """Yield a trial with one size smaller, and the line that runs it, but for those tried."""
    for name, size in trial.case.shape.items():
        for smaller in sorted({n for n in (1, 2, size // 2, size - 1) if 0 < n < size}):
            candidate = trial.resized(**{name: smaller})
            if (line := subject.line(candidate)) not in tried:
                yield candidate, line


def try_smaller(
    prop: Property,
    op: Op,
    quick: bool,
    device: str,
    line: str,
    sizes: Mapping[str, int],
    tried: Collection[str],
    may_stray: bool,
    announce: Announce,
) -> bool:
    """Run inputs that are smaller than one that has ended a process, each announced before.

    One that ends this process, too, is where the next begins.

    Args:
        prop: the property.
        op: the op.
        quick: whether the inputs are those of the quick check.
        device: "cpu" or "cuda".
        line: what runs the input again that ended the first process.
        sizes: of the smallest input so far that ended one.
        tried: lines of the smaller inputs that need not run again.
        may_stray: whether a write beyond a tensor may have ended it.
        announce: told of each.

    Returns:
        Whether the op writes beyond a tensor on this input; then no smaller one is run.
    """
    with _subject(prop, op, device, announce) as subject:
        trials = prop.trials(op, quick, device)
        trial = next((trial for trial in trials if subject.line(trial) == line), None)
        if trial is None:
            return False
        if may_stray and _writes_beyond(op, replace(trial, layouts={}, step=""), device):
            return True
        for candidate, its_line in _smaller(subject, trial.resized(**sizes), tried):
            announce(its_line, "", mark(candidate))
            examine(prop, op, candidate, device)
    return False


def _writes_beyond(op: Op, trial: Trial, device: str) -> bool:
    try:
        return bool(written_beyond(op, trial, device))
    except Exception:  # what it raises is no write
        return False

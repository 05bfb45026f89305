"""One property of one op: tried up to the first input that breaks it, which is made smaller."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearlight.core.cuda import NoEmulator
from nearlight.core.op import Case, Op
from nearlight.workbench.check_report import NOT_APPLICABLE, Row
from nearlight.workbench.compare import redrawn
from nearlight.workbench.property import NotApplicable, Property, remarked
from nearlight.workbench.trial import Launches, Refused, Rejected, Trial, launches

# Steps tried to make a failing input smaller.
MAX_SHRINK_STEPS = 16
# A row that stands on no more cases than these names them.
MAX_NAMED_CASES = 4
ON_A_GPU = "CUDA C++ on CPU tensors needs an emulator: run it on a GPU with --device cuda"

# `(line, reason)`: told before an input is run, with the line that runs it again; with a reason
# where it is known to break the property.
Announce = Callable[[str, str], None]


def unheard(line: str, reason: str) -> None:
    """Tell nobody; what runs in this process needs no witness."""


@dataclass(frozen=True)
class _Verdict:
    status: str
    num_trials: int
    reason: str
    line: str = ""


@dataclass(frozen=True)
class _Subject:
    """A property of an op on a device, and what its kernels were seen to do."""

    prop: Property
    op: Op
    device: str
    seen: Launches
    announce: Announce

    def examine(self, trial: Trial) -> str | Rejected:
        """Return what `examine` says; NoEmulator where a kernel could not run, even if caught."""
        if self.announce is not unheard:
            self.announce(self.line(trial), "")
        self.seen.not_run = ""
        outcome = examine(self.prop, self.op, trial, self.device)
        if self.seen.not_run:
            raise NoEmulator(self.seen.not_run)
        return outcome

    def line(self, trial: Trial) -> str:
        return reproduce_line(self.prop, self.op, trial, self.device)


def prove_property(
    prop: Property, op: Op, quick: bool, device: str, announce: Announce = unheard
) -> Row:
    """Try a property on its trials, smallest first, up to the first that breaks it."""
    start = time.perf_counter()
    with launches() as seen:
        subject = _Subject(prop, op, device, seen, announce)
        try:
            found = _judge(subject, quick)
        except NotApplicable as answer:
            found = _Verdict(NOT_APPLICABLE, 0, str(answer))
        except NoEmulator:
            found = _Verdict(NOT_APPLICABLE, 0, ON_A_GPU)
    seconds = round(time.perf_counter() - start, 3)
    kernels = sorted({name for name, _ in seen})
    return Row(
        prop.number, prop.name, found.status, found.num_trials, found.reason, found.line,
        seconds, kernels,
    )  # fmt: skip


def _judge(subject: _Subject, quick: bool) -> _Verdict:
    prop, op, device = subject.prop, subject.op, subject.device
    subject.announce(_whole_line(prop, op, device), "")
    try:
        trials = sorted(prop.trials(op, quick, device), key=lambda trial: trial.size)
    except (NotApplicable, NoEmulator):
        raise
    except (Exception, SystemExit) as error:  # whatever an op raises here is the finding
        return _Verdict("failed", 0, f"no input could be made: {_describe(error)}")
    listed = [*op.check_cases, *(extreme.case for extreme in op.extremes)]
    tried: list[Case] = []
    num_redrawn, refusals, noted = 0, [], []
    rejection = ""
    for trial in trials:
        with redrawn() as names, remarked() as said:
            outcome = subject.examine(trial)
        num_redrawn += len(names)
        noted += said
        if isinstance(outcome, Rejected):
            rejection = str(outcome)
            if isinstance(outcome, Refused):
                refusals.append(rejection)
            elif trial.case in listed and not trial.layouts:
                return _Verdict("failed", len(tried), rejection, subject.line(trial))
            continue
        tried.append(trial.case)
        if outcome:
            smallest, reason = _shrink(subject, trial, outcome)
            return _Verdict("failed", len(tried), reason, subject.line(smallest))
    if not tried:
        return _Verdict("failed", 0, f"no input could be made: {rejection or 'no trial'}")
    return _Verdict("passed", len(tried), "; ".join(_remarks(tried, noted, refusals, num_redrawn)))


def _remarks(
    tried: Sequence[Case], noted: Sequence[str], refusals: Sequence[str], num_redrawn: int
) -> list[str]:
    remarks = [f"refuses {refusals[0]}"] if refusals else []
    if len(refusals) > 1:
        remarks.append(f"and {len(refusals) - 1} more inputs")
    noun = "result" if num_redrawn == 1 else "results"
    remarks += [f"{num_redrawn} {noun} drawn again"] if num_redrawn else []
    cases = list(dict.fromkeys(map(_case_text, tried)))
    if noted:
        remarks = [*dict.fromkeys(noted), *remarks]
    elif len(cases) <= MAX_NAMED_CASES:
        remarks.insert(0, f"on {'; '.join(cases)}")
    return remarks


def _case_text(case: Case) -> str:
    """Return "rows 3 × columns 5 in bfloat16, casting=llama"."""
    sizes = " × ".join(f"{name} {size}" for name, size in case.shape.items())
    options = "".join(f", {name}={value}" for name, value in case.options.items())
    return f"{sizes} in {str(case.dtype).removeprefix('torch.')}{options}"


def examine(prop: Property, op: Op, trial: Trial, device: str) -> str | Rejected:
    """Return how the property is broken, "" if it holds, or why there is no such input."""
    try:
        return prop.examine(op, trial, device)
    except Rejected as rejected:
        return rejected
    except (Exception, SystemExit) as error:  # whatever an op raises is the finding
        return f"raised {_describe(error)}"


def _describe(error: BaseException) -> str:
    lines = (str(error).strip() or "no message").splitlines()
    told = next((line.strip() for line in lines if ": error:" in line), lines[0])
    if told.startswith("at ") and len(lines) > 1:  # Triton: a place in the kernel, its lines, why
        told = f"{lines[-1].strip()} ({told.rstrip(':')} of the kernel)"
    return f"{type(error).__name__}: {told}"


def _shrink(subject: _Subject, trial: Trial, reason: str) -> tuple[Trial, str]:
    """Make a failing trial smaller as long as it fails, one size at a time."""
    steps = 0
    is_smaller = True
    subject.announce(subject.line(trial), reason)
    while is_smaller:
        is_smaller = False
        for name, size in trial.case.shape.items():
            for smaller in sorted({1, 2, size // 2, size - 1} & set(range(1, size))):
                if steps >= MAX_SHRINK_STEPS:
                    return trial, reason
                steps += 1
                candidate = trial.resized(**{name: smaller})
                outcome = subject.examine(candidate)
                if outcome and not isinstance(outcome, Rejected):
                    trial, reason, is_smaller = candidate, outcome, True
                    subject.announce(subject.line(trial), reason)
                    break
    return trial, reason


def reproduce_line(prop: Property, op: Op, trial: Trial, device: str) -> str:
    """Return one line of Python that shows the failure again."""
    default = Trial(trial.case)
    further = {
        "options": trial.case.options or None,
        "device": None if device == "cpu" else device,
        **{
            name: getattr(trial, name)
            for name in ("seed", "values", "layouts", "upstream", "step")
            if name == "seed" or getattr(trial, name) != getattr(default, name)
        },
    }
    arguments = [repr(source_of(op)), repr(prop.name), repr(dict(trial.case.shape))]
    arguments.append(str(trial.case.dtype))
    arguments += [f"{name}={value!r}" for name, value in further.items() if value is not None]
    imports = "import torch; from nearlight.workbench.check import reproduce"
    return f"{imports}; reproduce({', '.join(arguments)})"


def _whole_line(prop: Property, op: Op, device: str) -> str:
    """Return the line that shows what happens while a property's inputs are chosen."""
    call = f"check(load_op({source_of(op)!r}), device={device!r}, only=[{prop.name!r}])"
    return f"from nearlight.workbench.check import check, load_op; print({call})"


def source_of(op: Op) -> str:
    """Return what `load_op` takes to find this op again, or the nearest to it."""
    if home := home_of(op):
        return home
    module = sys.modules.get(getattr(op.reference, "__module__", None) or "")
    if module is None or not getattr(module, "__file__", None):
        return op.name
    # The file was loaded once more, or the record is a changed copy of one in it.
    same = [n for n, v in vars(module).items() if isinstance(v, Op) and v.name == op.name]
    attribute = same[0] if same and "OP" not in same else "OP"
    return f"{module.__file__}:{attribute}"


def home_of(op: Op) -> str:
    """Return what `load_op` takes to find this very record, or "" where no file holds it."""
    for maker in (op.reference, op.make_inputs, op.function):
        module = sys.modules.get(getattr(maker, "__module__", None) or "")
        if module is None or not getattr(module, "__file__", None):
            continue
        for name, value in vars(module).items():
            if value is op:
                is_ours = module.__name__.startswith("nearlight.ops.")
                return op.name if is_ours else f"{module.__file__}:{name}"
    return ""

"""`check`: prove an op, property by property, and name the smallest input that breaks one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import detect_gpu
from nearlight.core.op import Case, Op
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Proof, Report
from nearlight.core.versions import versions
from nearlight.workbench.compare import redrawn
from nearlight.workbench.properties import PROPERTIES
from nearlight.workbench.property import NotApplicable, Property
from nearlight.workbench.trial import Refused, Rejected, Trial, launches

# Steps tried to make a failing input smaller.
MAX_SHRINK_STEPS = 16
# A row that stands on no more cases than these names them.
MAX_NAMED_CASES = 4


@dataclass(frozen=True)
class Row:
    """What was found of one property.

    Attributes:
        number: place of the property in the list of the proof.
        property: its name.
        status: "passed", "failed" or "not applicable".
        num_trials: inputs it was tried on.
        reason: how it is broken, why it says nothing, or what the op refuses; the cases, where
            they are few.
        reproduce: one line of Python that shows the failure again.
        seconds: how long it took.
    """

    number: int
    property: str
    status: str
    num_trials: int
    reason: str
    reproduce: str
    seconds: float


def check(
    op: Op,
    quick: bool = False,
    device: str = "cpu",
    only: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Report:
    """Prove an op: run its kernels on many inputs against its reference in fp64.

    On CPU tensors the kernels are interpreted. Tolerance: `nearlight.core.numerics.judge`.

    Args:
        op: the record of an op, nearlight's or the user's.
        quick: prove values, gradients, one layout of each family and guard zones alone.
        device: "cpu" or "cuda".
        only: names of the properties to prove; by default all.
        progress: called with a line when a property is done.

    Returns:
        A report with one row per property; `report.proof.passed` is the verdict.

    Raises:
        BadInput: a property or device that does not exist.
        MissingPart: the device is cuda and there is no GPU.

    Example:
        >>> from nearlight.workbench.check import check, load_op
        >>> report = check(load_op("rms_norm"), quick=True)  # doctest: +SKIP
        >>> print(report.answer)  # doctest: +SKIP
        rms_norm: 3 of 3 properties hold
    """
    _require_device(device)
    rows, kernels = [], set()
    for prop in _chosen(only, quick):
        with launches() as seen:
            row = _prove(prop, op, quick, device)
        kernels |= {name for name, _ in seen}
        rows.append(row)
        progress(f"{op.name} {row.property}: {row.status} ({row.seconds:.1f} s)")
    gpu = None if device == "cpu" else detect_gpu()
    failed = [row for row in rows if row.status == "failed"]
    judged = [row for row in rows if row.status != "not applicable"]
    what = ", ".join(sorted(kernels)) if kernels else "no nearlight kernel: plain PyTorch code"
    verdict = f"{op.name}: {len(judged) - len(failed)} of {len(judged)} properties hold"
    if failed:
        verdict += f"; broken: {', '.join(row.property for row in failed)}"
    method = f"{'interpreted' if device == 'cpu' else 'on ' + device}; launched {what}"
    next_step = failed[0].reproduce if failed else f"nearlight bench {op.name}"
    as_dicts = [{k: v for k, v in vars(row).items() if k != "reproduce" or v} for row in rows]
    return Report(
        verb="check",
        answer=verdict,
        target=op.name,
        gpu=gpu.key if gpu else "",
        setup=f"{'quick' if quick else 'full'} check, {method}",
        versions=versions(on_gpu=gpu is not None),
        proof=Proof(bool(judged) and not failed, (), method),
        rows=as_dicts,
        next=next_step,
    )


def reproduce(
    op: str | Op,
    property_name: str,
    shape: Mapping[str, int],
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **trial: Any,
) -> None:
    """Run one trial of one property again; raise AssertionError if it still fails.

    Args:
        op: name, `file.py`, `file.py:NAME`, or the record itself.
        property_name: as the check's row names it.
        shape: sizes of the case.
        dtype: dtype of the case.
        options: options of the case.
        device: "cpu" or "cuda".
        **trial: further fields of `nearlight.workbench.trial.Trial`.
    """
    _require_device(device)
    record = load_op(op) if isinstance(op, str) else op
    (prop,) = _chosen([property_name], quick=False)
    name = "x".join(str(size) for size in shape.values())
    case = Case(name, dict(shape), dtype, dict(options or {}))
    # A listed case goes by its own record, so that its size counts as promised.
    listed = (c for c in record.check_cases if replace(c, name=name) == case)
    outcome = _examine(prop, record, Trial(next(listed, case), **trial), device)
    if isinstance(outcome, Rejected):
        raise AssertionError(f"{record.name} has no such input: {outcome}") from outcome
    if outcome:
        raise AssertionError(outcome)
    print(f"{record.name}: {property_name} holds on this input")


def load_op(name: str) -> Op:
    """Return an Op record by the name of an op, or from a file.

    Args:
        name: "rms_norm", "my_op.py" (its `OP`) or "my_op.py:NAME".

    Raises:
        BadInput: no such op, file or record; the nearest names are offered.
    """
    path, _, attribute = name.partition(".py:")
    if name.endswith(".py") or attribute:
        file = Path(path if name.endswith(".py") else path + ".py")
        return _record(_load_file(file), attribute or "OP", str(file))
    folder = Path(str(importlib.import_module("nearlight.ops").__path__[0]))
    names = sorted(
        entry.stem
        for entry in folder.iterdir()
        if not entry.name.startswith(("_", ".")) and (entry.suffix == ".py" or entry.is_dir())
    )
    if name not in names:
        near = difflib.get_close_matches(name, names, 3) or names
        raise BadInput(
            f"no op called {name!r}; nearest: {', '.join(near)}. "
            "An op of your own is named by its file: my_op.py or my_op.py:NAME"
        )
    return _record(importlib.import_module(f"nearlight.ops.{name}"), "OP", name)


def list_ops() -> Report:
    """Return the ops of nearlight, each with its signature and what its recorded proof says."""
    from nearlight.ops import OPS
    from nearlight.workbench import record

    rows = [
        {
            "op": name,
            "signature": f"{name}({', '.join(_arguments(op))})",
            "proof": f"out of date: {reason}" if (reason := record.stale(op)) else "proved",
        }
        for name, op in sorted(OPS.items())
    ]
    num_proved = sum(row["proof"] == "proved" for row in rows)
    return Report(
        verb="ops",
        answer=f"{len(rows)} ops, {num_proved} with a proof of their present source",
        versions=versions(),
        rows=rows,
        next=f"nearlight check {rows[0]['op']} --quick" if rows else "",
    )


def _arguments(op: Op) -> list[str]:
    parameters = inspect.signature(op.function).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def source_of(op: Op) -> str:
    """Return what `load_op` takes to find this op again."""
    module = sys.modules.get(getattr(op.reference, "__module__", ""))
    if module is None or not getattr(module, "__file__", None):
        return op.name
    if module.__name__.startswith("nearlight.ops."):
        return op.name
    records = {name: value for name, value in vars(module).items() if isinstance(value, Op)}
    attribute = next((name for name, value in records.items() if value.name == op.name), "OP")
    return f"{module.__file__}:{attribute}"


def _require_device(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device={device!r}: allowed are cpu and cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingPart(
            f"device={device!r}: this machine has no GPU that torch sees; on cpu the kernels are "
            "interpreted"
        )


def _chosen(only: Sequence[str] | None, quick: bool) -> list[Property]:
    known = {prop.name: prop for prop in PROPERTIES}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise BadInput(f"no property called {unknown[0]!r}; there are {', '.join(known)}")
    return [
        prop
        for prop in PROPERTIES
        if (only is None or prop.name in only) and (prop.in_quick or not quick)
    ]


def _prove(prop: Property, op: Op, quick: bool, device: str) -> Row:
    """Try a property on its trials, smallest first, up to the first that breaks it."""
    start = time.perf_counter()

    def row(status: str, num_trials: int, reason: str, line: str = "") -> Row:
        seconds = round(time.perf_counter() - start, 3)
        return Row(prop.number, prop.name, status, num_trials, reason, line, seconds)

    try:
        trials = sorted(prop.trials(op, quick, device), key=lambda trial: trial.size)
    except NotApplicable as answer:
        return row("not applicable", 0, str(answer))
    except Exception as error:  # whatever an op raises here is the finding
        return row("failed", 0, f"no input could be made: {_describe(error)}")
    listed = [*op.check_cases, *(extreme.case for extreme in op.extremes)]
    tried: list[Case] = []
    num_redrawn, refusals = 0, []
    rejection = ""
    for trial in trials:
        with redrawn() as names:
            outcome = _examine(prop, op, trial, device)
        num_redrawn += len(names)
        if isinstance(outcome, Rejected):
            rejection = str(outcome)
            if isinstance(outcome, Refused):
                refusals.append(rejection)
            elif trial.case in listed and not trial.layouts:
                return row("failed", len(tried), rejection, _line(prop, op, trial, device))
            continue
        tried.append(trial.case)
        if outcome:
            smallest = _shrink(prop, op, trial, device)
            reason = str(_examine(prop, op, smallest, device))
            return row("failed", len(tried), reason, _line(prop, op, smallest, device))
    if not tried:
        return row("failed", 0, f"no input could be made: {rejection or 'no trial'}")
    remarks = [f"refuses {'; '.join(refusals)}"] if refusals else []
    noun = "result" if num_redrawn == 1 else "results"
    remarks += [f"{num_redrawn} {noun} drawn again"] if num_redrawn else []
    cases = list(dict.fromkeys(map(_case_text, tried)))
    if len(cases) <= MAX_NAMED_CASES:
        remarks.insert(0, f"on {'; '.join(cases)}")
    return row("passed", len(tried), "; ".join(remarks))


def _case_text(case: Case) -> str:
    """Return "rows 3 × columns 5 in bfloat16, casting=llama"."""
    sizes = " × ".join(f"{name} {size}" for name, size in case.shape.items())
    options = "".join(f", {name}={value}" for name, value in case.options.items())
    return f"{sizes} in {str(case.dtype).removeprefix('torch.')}{options}"


def _examine(prop: Property, op: Op, trial: Trial, device: str) -> str | Rejected:
    """Return how the property is broken, "" if it holds, or why there is no such input."""
    try:
        return prop.examine(op, trial, device)
    except Rejected as rejected:
        return rejected
    except Exception as error:  # whatever an op raises is the finding
        return f"raised {_describe(error)}"


def _describe(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _shrink(prop: Property, op: Op, trial: Trial, device: str) -> Trial:
    """Make a failing trial smaller as long as it fails, one size at a time."""
    steps = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for name, size in trial.case.shape.items():
            for smaller in sorted({1, 2, size // 2, size - 1} & set(range(1, size))):
                if steps >= MAX_SHRINK_STEPS:
                    return trial
                steps += 1
                candidate = trial.resized(**{name: smaller})
                outcome = _examine(prop, op, candidate, device)
                if outcome and not isinstance(outcome, Rejected):
                    trial, is_smaller = candidate, True
                    break
    return trial


def _line(prop: Property, op: Op, trial: Trial, device: str) -> str:
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


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise BadInput(f"no file {file}")
    # Under a name of its own, so that a file called torch.py hides nothing.
    name = f"nearlight_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _record(module: ModuleType, attribute: str, where: str) -> Op:
    record = getattr(module, attribute, None)
    if not isinstance(record, Op):
        found = [name for name, value in vars(module).items() if isinstance(value, Op)]
        hint = f"it has {', '.join(found)}" if found else "define OP = Op(...)"
        raise BadInput(f"{where} has no Op record called {attribute}; {hint}")
    return record

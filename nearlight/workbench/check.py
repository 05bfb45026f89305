"""`check`: prove an op, property by property, and name the smallest input that breaks one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nearlight.core.errors import BadInput, MissingPart, one_line
from nearlight.core.hardware import detect_gpu
from nearlight.core.op import Case, Op
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Report
from nearlight.core.user_code import PREFIX, is_own, package_root, split_name
from nearlight.core.versions import versions
from nearlight.workbench.check_report import NOT_APPLICABLE, Header, Row, as_report
from nearlight.workbench.properties import PROPERTIES
from nearlight.workbench.property import Property
from nearlight.workbench.trial import Rejected, Trial
from nearlight.workbench.verdict import Announce, examine, prove_property, source_of, unheard

# The one property that is proved only where it is asked for: it runs every kernel four times over.
ON_REQUEST = "sanitizer"


def check(
    op: Op,
    quick: bool = False,
    device: str = "cpu",
    only: Sequence[str] | None = None,
    progress: Progress = silent,
    *,
    sanitize: bool = False,
) -> Report:
    """Prove an op: run its kernels on many inputs against its reference in fp64.

    On CPU tensors the kernels are interpreted. Tolerance: `nearlight.core.numerics.judge`. An op
    that crashes or hangs takes this process with it: `check_apart` runs it in one of its own.

    Args:
        op: the record of an op, nearlight's or the user's.
        quick: prove values, gradients, one layout of each family and guard zones alone.
        device: "cpu" or "cuda".
        only: names of the properties to prove; by default all.
        progress: called with a line when a property is done.
        sanitize: prove the property "sanitizer", too.

    Returns:
        A report with one row per property; `report.proof.passed` is the verdict.

    Raises:
        BadInput: a property or device that does not exist, or source that runs on no input: it
            does not compile, or a launch does not fit its kernel.
        MissingPart: the device is cuda and there is no GPU.

    Example:
        >>> from nearlight.workbench.check import check, load_op
        >>> report = check(load_op("rms_norm"), quick=True)  # doctest: +SKIP
        >>> print(report.answer)  # doctest: +SKIP
        rms_norm: 3 of 3 properties hold
    """
    header = describe(op, source_of(op) or op.name, quick, device)
    rows = []
    for row in each_row(op, chosen(only, quick, sanitize), quick, device, only, sanitize):
        rows.append(row)
        progress(f"{op.name} {row}")
    return as_report(header, rows)


def describe(op: Op, source: str, quick: bool, device: str) -> Header:
    """Return what is known before the first row; BadInput or MissingPart for the device."""
    require_device(device)
    gpu = None if device == "cpu" else detect_gpu()
    on_gpu = gpu is not None
    return Header(op.name, source, quick, device, gpu.key if gpu else "", versions(on_gpu))


def each_row(
    op: Op,
    properties: Sequence[Property],
    quick: bool,
    device: str,
    only: Collection[str] | None,
    sanitize: bool,
    announce: Announce = unheard,
) -> Iterator[Row]:
    """Yield the row of each property in turn."""
    for prop in properties:
        if prop.name == ON_REQUEST and not sanitize and prop.name not in (only or ()):
            yield Row(prop.number, prop.name, NOT_APPLICABLE, 0, "--sanitize runs it", "", 0.0)
        else:
            yield prove_property(prop, op, quick, device, announce)


def reproduce(
    op: str | Op,
    property_name: str,
    shape: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    quick: bool = False,
    **trial: Any,
) -> None:
    """Run one trial of one property again; raise AssertionError if it still fails.

    Args:
        op: name, `file.py`, `file.py:NAME`, or the record itself.
        property_name: as the check's row names it.
        shape: sizes of the case; None for the whole property.
        dtype: dtype of the case.
        options: options of the case.
        device: "cpu" or "cuda".
        quick: whether a whole property is that of the quick check.
        **trial: further fields of `nearlight.workbench.trial.Trial`.
    """
    require_device(device)
    record = load_op(op) if isinstance(op, str) else op
    (prop,) = chosen([property_name])
    if shape is None:
        row = prove_property(prop, record, quick, device)
        if row.status == "failed":
            raise AssertionError(row.reason)
        return print(f"{record.name}: {property_name}: {row.status} {row.reason}")
    name = "x".join(str(size) for size in shape.values())
    case = Case(name, dict(shape), dtype, dict(options or {}))
    # A listed case goes by its own record, so that its size counts as promised.
    listed = (c for c in record.check_cases if replace(c, name=name) == case)
    outcome = examine(prop, record, Trial(next(listed, case), **trial), device)
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
    file, attribute = split_name(name)
    if file is not None:
        if file.suffix == ".cu":
            raise BadInput(f"{name}: an op is named by the Python file that launches {file.name}")
        return _record(load_file(file), attribute or "OP", str(file))
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


def require_device(device: str) -> None:
    """Raise BadInput for a device that does not exist, MissingPart for one that is not here."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device={device!r}: allowed are cpu and cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingPart(
            f"device={device!r}: this machine has no GPU that torch sees; on cpu the kernels are "
            "interpreted"
        )


def chosen(
    only: Collection[str] | None, quick: bool = False, sanitize: bool = False
) -> list[Property]:
    """Return the properties that are asked for, in order; BadInput for a name that is none."""
    known = {prop.name: prop for prop in PROPERTIES}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise BadInput(f"no property called {unknown[0]!r}; there are {', '.join(known)}")
    return [
        prop
        for prop in PROPERTIES
        if (
            prop.name in only
            if only is not None
            else prop.in_quick or not quick or (sanitize and prop.name == ON_REQUEST)
        )
    ]


def load_file(file: Path) -> ModuleType:
    """Import a file of the user's; BadInput with file and line where that fails."""
    if not file.is_file():
        raise BadInput(f"no file {file}")
    # Found last and under a name of its own, so that a file called torch.py hides nothing.
    root, package = package_root(file)
    sys.path += [str(p) for p in (root, file.resolve().parent) if str(p) not in sys.path]
    anchor = f"{PREFIX}{zlib.crc32(str(root).encode()):08x}"
    sys.modules.setdefault(anchor, ModuleType(anchor)).__path__ = [str(root)]
    package = ".".join(filter(None, (anchor, package)))
    name = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        importlib.import_module(package)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise BadInput(f"{_place(error, file)}: {one_line(error)}") from error
    return module


def _place(error: BaseException, file: Path) -> str:
    """Return file and line of the user's that an import failed at."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(file)


def _record(module: ModuleType, attribute: str, where: str) -> Op:
    record = getattr(module, attribute, None)
    if not isinstance(record, Op):
        found = [name for name, value in vars(module).items() if isinstance(value, Op)]
        hint = f"it has {', '.join(found)}" if found else "define OP = Op(...)"
        raise BadInput(f"{where} has no Op record called {attribute}; {hint}")
    for part in ("function", "reference", "make_inputs"):
        if not callable(value := getattr(record, part)):
            raise BadInput(f"{where}: {attribute} has {part}={value!r}; give it a function")
    if not record.check_cases:
        raise BadInput(f"{where}: {attribute} has no check_cases; give it at least one small Case")
    return record

"""`check`: prove an op, property by property, and name the smallest input that breaks one."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import detect_gpu
from nearlight.core.op import Case, Op
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Report
from nearlight.core.versions import versions
from nearlight.workbench.check_report import NOT_APPLICABLE, Header, Row, as_report
from nearlight.workbench.load import load_op, source_of
from nearlight.workbench.properties import PROPERTIES
from nearlight.workbench.property import Property
from nearlight.workbench.trial import Rejected, Trial
from nearlight.workbench.verdict import Announce, examine, prove_property, unheard

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
        A report with one row per property; `report.proof.verdict` is passed, failed or
            incomplete.

    Raises:
        BadInput: a property or device that does not exist, or source that runs on no input: it
            does not compile, or a launch does not fit its kernel.
        MissingPart: the device is cuda and there is no GPU.

    Example:
        >>> from nearlight.workbench.check import check
        >>> from nearlight.workbench.load import load_op
        >>> report = check(load_op("rms_norm"), quick=True)  # doctest: +SKIP
        >>> print(report.answer)  # doctest: +SKIP
        rms_norm: 3 of 3 properties hold
    """
    header = describe(op, source_of(op) or op.name, quick, device, only)
    rows = []
    for row in each_row(op, chosen(only, quick, sanitize), quick, device, only, sanitize):
        rows.append(row)
        progress(f"{op.name} {row}")
    return as_report(header, rows)


def describe(
    op: Op, source: str, quick: bool, device: str, only: Collection[str] | None = None
) -> Header:
    """Return what is known before the first row; BadInput or MissingPart for the device."""
    require_device(device)
    gpu = None if device == "cpu" else detect_gpu()
    on_gpu = gpu is not None
    key = gpu.key if gpu else ""
    return Header(op.name, source, quick, device, key, versions(on_gpu), tuple(only or ()))


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
    shape: Mapping[str, int],
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **trial: Any,
) -> None:
    """Run one trial of one property again.

    Args:
        op: name, `file.py`, `file.py:NAME`, or the record itself.
        property_name: as the check's row names it.
        shape: sizes of the case.
        dtype: dtype of the case.
        options: options of the case.
        device: "cpu" or "cuda".
        **trial: further fields of `nearlight.workbench.trial.Trial`.

    Raises:
        AssertionError: the property does not hold on this input, or there is no such input.
        BadInput, MissingPart: as of `check`.
    """
    prop, record = _asked(op, property_name, device)
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


def reproduce_property(
    op: str | Op, property_name: str, *, device: str = "cpu", quick: bool = False
) -> None:
    """Try one property again on all of its inputs, for what fails before one is chosen.

    Args:
        op: name, `file.py`, `file.py:NAME`, or the record itself.
        property_name: as the check's row names it.
        device: "cpu" or "cuda".
        quick: whether its inputs are those of the quick check.

    Raises:
        AssertionError: the property does not hold.
        BadInput, MissingPart: as of `check`.
    """
    prop, record = _asked(op, property_name, device)
    row = prove_property(prop, record, quick, device)
    if row.status == "failed":
        raise AssertionError(row.reason)
    print(f"{record.name}: {property_name}: {row.status} {row.reason}")


def _asked(op: str | Op, property_name: str, device: str) -> tuple[Property, Op]:
    require_device(device)
    (prop,) = chosen([property_name])
    return prop, load_op(op) if isinstance(op, str) else op


def list_ops() -> Report:
    """Return the ops of nearlight, each with its signature and what its recorded proof says."""
    from nearlight.ops import OPS
    from nearlight.workbench import record

    rows = [
        {
            "op": name,
            "signature": f"{name}({', '.join(_arguments(op))})",
            "proof": f"out of date: {record.in_brief(reason)}" if reason else "proved",
            "out_of_date": reason,
        }
        for name, op in sorted(OPS.items())
        for reason in (record.stale(op),)
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

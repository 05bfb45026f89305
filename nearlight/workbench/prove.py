"""`prove`: the full check of ops in processes of their own, and the records of what was proved.

python -m nearlight.workbench.prove            # every op; rewrites nearlight/data/proofs
python -m nearlight.workbench.prove --due      # what CI has to prove today; writes nothing
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nearlight.core.builds import compile_build
from nearlight.core.errors import BadInput, MissingPart, one_line
from nearlight.core.op import Op
from nearlight.core.report import Report
from nearlight.workbench import record
from nearlight.workbench.apart import check_apart, prove_apart
from nearlight.workbench.check import check, require_device
from nearlight.workbench.check_report import broken
from nearlight.workbench.load import home_of, load_op

# A record's status of a property that takes a GPU, where there was none.
NOT_RUN = "not run"


def assert_proved(op: str | Op, quick: bool = False, *, device: str = "cpu") -> None:
    """Raise AssertionError unless an op is proved as its source stands now.

    For an op of nearlight the recorded proof has to hold. An op of your own is proved here, in a
    process of its own where a file defines it, and not again before its source or a version
    changes: the record of a passed check lies in the folder `.nearlight/proofs` beside its file.
    What cannot be run on a CPU is a warning; CUDA C++, where there is a GPU, is refused.

    Args:
        op: name of an op, `file.py`, `file.py:NAME`, or the record itself.
        quick: be content with the quick check for an op of your own.
        device: "cpu" or "cuda", where an op of your own is proved.

    Raises:
        AssertionError: how each failed property is broken, with the line that shows it again; or
            that values were not computed on a CPU though there is a GPU.
        BadInput: no such op, or a file that does not import.
        MissingPart: the device is cuda and there is no GPU.

    Example:
        >>> import nearlight
        >>> nearlight.assert_proved("rms_norm")  # doctest: +SKIP
        >>> nearlight.assert_proved("my_op.py", quick=True)  # doctest: +SKIP
    """
    if not op:
        raise BadInput("assert_proved takes an op's name, file.py, file.py:NAME or a record")
    source = op if isinstance(op, str) else home_of(op)
    file = record.file_of(source)
    if source and file is None:
        found = load_op(source)
        if reason := record.stale(found):
            raise AssertionError(f"{found.name}: {reason}; run `make prove`")
        return
    if file is None:
        assert isinstance(op, Op)
        report = check(op, quick, device)
        _require_holds(report)
        return _require_run(report.target, _record(report, {}, {}, device))
    if not file.is_file():
        raise BadInput(f"no file {file}")
    require_device(device)
    path = record.beside(source, device)
    sources = record.file_sources(file)  # before the check: what is edited meanwhile is not proved
    if not record.outdated(path, sources, quick, device):
        kept = record.load(path.stem, path.parent) or {}
    else:
        report = check_apart(source, quick, device)
        _require_holds(report)
        kept = _record(report, sources, {}, device)
        try:
            record.write(kept, path)
        except OSError as error:
            warnings.warn(f"the proof is not kept: {one_line(error)}", stacklevel=2)
    _require_run(source, kept)


def _require_run(source: str, kept: Mapping[str, Any]) -> None:
    """Warn of each property of a record that was not run; refuse values where they could be."""
    reasons = {
        row["property"]: row["reason"] for row in kept["properties"] if row["status"] == NOT_RUN
    }
    told = f"{source}: {', '.join(reasons)} not run: {'; '.join(dict.fromkeys(reasons.values()))}"
    if "values" in reasons and torch.cuda.is_available():
        raise AssertionError(f"{told}; one is here: assert_proved(..., device='cuda')")
    if reasons:
        rest = "the rest is proved" if kept["passed"] else "nothing is proved"
        warnings.warn(f"{told}; {rest}", stacklevel=3)


def _require_holds(report: Report) -> None:
    if lines := broken(report):
        raise AssertionError("\n".join((report.answer, *lines)))


def _record(
    report: Report, sources: Mapping[str, str], code: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """Return what is kept of a check: sources, properties, machine code, versions, verdict."""
    assert report.proof is not None
    kept = ("number", "property", "status", "num_trials", "reason", "reproduce")
    rows = [{**row, "status": NOT_RUN} if row.get("needs_gpu") else row for row in report.rows]
    return {
        "schema": record.SCHEMA,
        "op": report.target,
        "passed": report.proof.passed,
        "method": report.proof.method,
        "device": device,
        "sources": sources,
        "properties": [{k: row[k] for k in kept if k in row} for row in rows],
        "machine_code": code,
        "versions": report.versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def prove_all(
    names: Sequence[str], jobs: int = 2, folder: Path | None = record.FOLDER
) -> dict[str, str]:
    """Prove several ops, each in a process of its own; return what failed, by name.

    Args:
        names: what `load_op` takes.
        jobs: processes at a time.
        folder: where the records go; None writes none.
    """
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for name, found in zip(names, pool.map(_in_child, names), strict=True):
            if isinstance(found, str):
                failed[name] = found
            else:
                if folder is not None:
                    record.save(found, folder)
                if reasons := _reasons(found):
                    failed[name] = reasons
            print(f"{name}: {failed.get(name, 'proved')}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if all that was proved holds, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m nearlight.workbench.prove", description=__doc__
    )
    parser.add_argument("ops", nargs="*", help="names of ops, or file.py:NAME; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--due", action="store_true", help="changed ops and two drawn by date")
    options = parser.parse_args(arguments)
    from nearlight.ops import OPS

    names = options.ops or list(OPS)
    if options.due:
        reasons = record.due({name: load_op(name) for name in names})
        for name, reason in reasons.items():
            print(f"{name} is proved: {reason}", flush=True)
        names = list(reasons)
    start = time.perf_counter()
    failed = prove_all(names, options.jobs, None if options.due else record.FOLDER)
    seconds = time.perf_counter() - start
    print(f"{len(names) - len(failed)} of {len(names)} ops proved in {seconds:.0f} s")
    return 1 if failed else 0


def _in_child(name: str) -> dict[str, Any] | str:
    """Prove one op in a child process; return its record, or why there is none."""
    try:
        found = prove_apart(name, lambda line: print(line, flush=True))
    except (BadInput, MissingPart) as error:
        return str(error)
    return _record(found.report, found.sources, found.machine_code, "cpu")


def machine_code(op: Op, arch: str) -> dict[str, Any]:
    """Return what an op's kernels take on an arch, for its record; budgets are property 12's."""
    try:
        codes = [(build, compile_build(build, arch)) for build in op.builds(arch)]
    except ValueError as error:
        return {"refused": str(error), "kernels": []}
    kernels = [
        {
            "kernel": code.name,
            "constants": {name: str(value) for name, value in build.constants.items()},
            "registers": code.registers,
            "spill_bytes": code.spill_bytes,
            "shared_bytes": code.shared_bytes,
            "matrix_instructions": code.matrix_instructions,
        }
        for build, code in codes
    ]
    return {"kernels": kernels}


def _reasons(found: Mapping[str, Any]) -> str:
    """Return what a record says against its op, one line."""
    broken = [
        f"{row['property']}: {row['reason']}; {row.get('reproduce', '')}"
        for row in found["properties"]
        if row["status"] == "failed"
    ]
    if not broken and not found["passed"]:
        broken = ["no property could be judged"]
    return " | ".join(broken)


if __name__ == "__main__":
    sys.exit(main())

"""`prove`: the full check of ops in processes of their own, and the records of what was proved.

python -m nearlight.workbench.prove            # every op; rewrites nearlight/data/proofs
python -m nearlight.workbench.prove --due      # what CI has to prove today; writes nothing
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nearlight.core.builds import check_budget, compile_build
from nearlight.core.op import Op
from nearlight.core.report import write_aside
from nearlight.core.versions import versions
from nearlight.workbench import record
from nearlight.workbench.check import check, load_op

# sm_75 is compiled where an op has a build for it; an op may refuse it.
ARCHES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
MAY_BE_REFUSED = "sm_75"
TIMEOUT_S = 900


def prove(op: Op, arches: Sequence[str] = ARCHES) -> dict[str, Any]:
    """Run the full check of an op and compile its kernels; return the record.

    Args:
        op: the record of an op.
        arches: for which its `builds` are compiled and held to their budgets.

    Returns:
        What `nearlight/data/proofs/<op>.json` holds: sources, properties, machine code, versions
        and the verdict `passed`.
    """
    report = check(op, progress=lambda line: print(line, flush=True))
    assert report.proof is not None
    properties = [
        {name: row[name] for name in ("number", "property", "status", "num_trials", "reason")}
        | ({"reproduce": row["reproduce"]} if "reproduce" in row else {})
        for row in report.rows
    ]
    code = {arch: _machine_code(op, arch) for arch in arches}
    violations = [line for found in code.values() for line in found["violations"]]
    return {
        "schema": record.SCHEMA,
        "op": op.name,
        "passed": report.proof.passed and not violations,
        "method": report.proof.method,
        "sources": record.sources(op),
        "properties": properties,
        "machine_code": code,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def assert_proved(op: str | Op, folder: Path = record.FOLDER) -> None:
    """Raise AssertionError unless the recorded proof of an op passed and still holds.

    Args:
        op: name of an op, `file.py`, `file.py:NAME`, or the record itself.
        folder: where the records lie.

    Example:
        >>> from nearlight.workbench.prove import assert_proved
        >>> assert_proved("rms_norm")  # doctest: +SKIP
    """
    found = load_op(op) if isinstance(op, str) else op
    if reason := record.stale(found, folder):
        raise AssertionError(f"{found.name}: {reason}; run `make prove`")


def prove_all(
    names: Sequence[str], jobs: int = 2, folder: Path | None = record.FOLDER
) -> dict[str, str]:
    """Prove several ops, each in a process of its own; return what failed, by name.

    A process of its own, because a kernel that writes far outside its tensors ends it.

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
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        found = prove(load_op(options.ops[0]))
        write_aside(options.one, json.dumps(found, allow_nan=False))
        return 0
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
    """Prove one op in a child process; return its record, or how the process ended."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "record.json"
        command = [sys.executable, "-m", "nearlight.workbench.prove", name, "--one", str(output)]
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done after {TIMEOUT_S} s"
        if child.returncode < 0:
            last = (child.stdout.strip() or "nothing was proved yet").splitlines()[-1]
            return f"ended by {signal.Signals(-child.returncode).name} after: {last}"
        if child.returncode or not output.is_file():
            return (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _machine_code(op: Op, arch: str) -> dict[str, Any]:
    """Compile an op's kernels for an arch; return their resources and broken budgets."""
    kernels, violations = [], []
    try:
        for build in op.builds(arch):
            code = compile_build(build, arch)
            violations += check_budget(build, code)
            kernels.append(
                {
                    "kernel": code.name,
                    "constants": {name: str(value) for name, value in build.constants.items()},
                    "registers": code.registers,
                    "spill_bytes": code.spill_store_bytes + code.spill_load_bytes,
                    "shared_bytes": code.shared_bytes,
                    "matrix_instructions": code.matrix_instructions,
                }
            )
    except ValueError as error:
        if arch != MAY_BE_REFUSED:
            violations.append(f"{op.name} does not compile for {arch}: {error}")
        else:
            return {"refused": str(error), "kernels": [], "violations": []}
    return {"kernels": kernels, "violations": violations}


def _reasons(found: Mapping[str, Any]) -> str:
    """Return what a record says against its op, one line."""
    broken = [
        f"{row['property']}: {row['reason']}; {row.get('reproduce', '')}"
        for row in found["properties"]
        if row["status"] == "failed"
    ]
    over = [line for code in found["machine_code"].values() for line in code["violations"]]
    if not broken and not over and not found["passed"]:
        broken = ["no property could be judged"]
    return " | ".join(broken + over)


if __name__ == "__main__":
    sys.exit(main())

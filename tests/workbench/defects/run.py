"""Show that `check` names the defects only a GPU can show, and passes their sound twins.

    python tests/workbench/defects/run.py --json nearlight/data/results/h200/defects.json

With `--device cpu` it takes those that are found without a GPU, as the tests do.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from table import DEFECTS, Defect

from nearlight.core.hardware import detect_gpu
from nearlight.core.report import Report
from nearlight.core.versions import versions
from nearlight.workbench.apart import check_apart


@cache  # several defects share a sound twin
def found(target: str, prop: str, device: str) -> dict[str, Any]:
    """Return the row of one property of one op, proved in a process of its own."""
    report = check_apart(target, device=device, only=[prop], sanitize=prop == "sanitizer")
    (row,) = report.rows
    return {name: row[name] for name in ("status", "reason", "seconds")}


def show(defect: Defect, device: str) -> dict[str, Any]:
    """Return what `check` says of a defect and of its sound twin."""
    if device != "cpu" and torch.cuda.device_count() < defect.num_gpus:
        lacking = f"needs {defect.num_gpus} GPUs"
        row = {"status": "not run", "reason": lacking, "seconds": 0.0, "sound": "not run"}
        return {**_named(defect), **row, "caught": False}
    row, sound = (found(t, defect.property, device) for t in (defect.target, defect.sound))
    is_named = row["status"] == "failed" and defect.words in row["reason"]
    is_alone = sound["status"] == "passed"
    remark = {} if is_alone else {"sound_reason": sound["reason"]}
    caught = is_named and is_alone
    return {**_named(defect), **row, "sound": sound["status"], **remark, "caught": caught}


def _named(defect: Defect) -> dict[str, Any]:
    return {
        "defect": defect.fault,
        "record": f"{defect.file}:{defect.record}",
        "language": defect.language,
        "property": defect.property,
        "expected": defect.words,
        **({"blind": True} if defect.blind else {}),
    }


def main() -> int:
    """Run them all; exit 1 where one is not caught or a sound twin does not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="where the rows go")
    parser.add_argument("--only", metavar="RECORD", help="one defect, such as center.py:RACE")
    parser.add_argument("--jobs", type=int, default=1, help="defects at a time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    gpu = None if arguments.device == "cpu" else detect_gpu()
    if arguments.device == "cuda" and gpu is None:
        sys.exit("--device cuda: torch sees no GPU here")
    chosen = [
        defect
        for defect in DEFECTS
        if arguments.only in (None, f"{defect.file}:{defect.record}")
        and defect.needs_gpu == (arguments.device == "cuda")
    ]
    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(partial(show, device=arguments.device), chosen):
            rows.append(row)
            verdict = "caught" if row["caught"] else "NOT CAUGHT"
            print(
                f"{verdict:10}  {row['record']:32}  {row['property']:10}  {row['status']:8}  "
                f"sound twin {row['sound']}  {row['seconds']:.1f} s\n{'':12}{row['reason']}",
                flush=True,
            )
    num_caught = sum(row["caught"] for row in rows)
    answer = f"{num_caught} of {len(rows)} planted defects are named, their sound twins pass"
    if blind := [row["caught"] for row in rows if "blind" in row]:
        answer += f"; of those like the ones planted blind {sum(blind)} of {len(blind)}"
    report = Report(
        verb="check",
        answer=answer,
        target="planted defects",
        gpu=gpu.key if gpu else "",
        versions=versions(on_gpu=gpu is not None),
        rows=rows,
    )
    print(report.answer)
    if arguments.json:
        report.save_json(arguments.json)
    return 0 if rows and num_caught == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

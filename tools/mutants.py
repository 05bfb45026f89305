"""Mutants of our own kernels, and whether `nearlight check` catches them: the proof of the prover.

    python tools/mutants.py              # a sample of every op; writes nearlight/data/mutants.json
    python tools/mutants.py --again      # what survived then, after `check` was changed
    python tools/mutants.py rope --all   # every mutant of an op; writes nothing

Each mutant is one edit in a copy of the package and is checked in a process of its own, property
by property, up to the first that fails. One that crashes or hangs is caught like one that is told.
What survives is either equivalent, with its reason in tools/equivalent_mutants.toml, or a hole.
"""

import argparse
import collections
import datetime
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "nearlight" / "data" / "mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
OPS = ("layer_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu")
SAMPLE = 120
LEAST_CAUGHT = 0.95
# A mutant that takes this many times the CPU time of the sound op hangs.
PATIENCE = 10
LEAST_LIMIT_S = 30.0
# Waiting costs no CPU time, so a deadlock is ended by the clock.
TIMEOUT_S = 900
# These compile for every arch, which takes most of a check's time and says nothing of results.
COMPILED = ("determinism", "machine code", "sanitizer")
QUICK = " quick"  # marks the quick form of a property among the steps

Row = dict[str, object]
Steps = dict[str, float]  # property, quick or not, to the CPU seconds that the sound op takes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if enough is caught, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/mutants.py", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of ops; by default all")
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample")
    parser.add_argument("--again", action="store_true", help="what survived the last time alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="whose package is mutated")
    parser.add_argument("--out", type=Path, help="where the result goes")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0
    ops = options.ops or list(OPS)
    every = mutants_of_all(options.root, ops)
    chosen = every if options.all else sample(every, SAMPLE)
    reasons = equivalents()
    if not options.ops:
        known = {mutant.key for mutant in every}
        if gone := [key for key in reasons if key not in known]:
            sys.exit(f"{EQUIVALENT.name} lists what is no mutant (its line changed?): {gone[0]}")
    out = options.out or (None if options.ops or options.all else RESULT)
    kept: list[Row] = []
    if options.again and out is not None:
        earlier = json.loads(out.read_text(encoding="utf-8"))["rows"]
        present = {mutant.key for mutant in every}
        kept = [row for row in earlier if row["caught_by"] and row["key"] in present]
        missed = {row["key"] for row in earlier if not row["caught_by"]}
        chosen = [mutant for mutant in every if mutant.key in missed]
        ops = sorted({mutant.op for mutant in chosen})
    with bench(options.root, options.jobs) as place:
        with ThreadPoolExecutor(options.jobs) as pool:
            sound = dict(zip(ops, pool.map(place.sound, ops), strict=True))
        rows = kept + list(place.run(chosen, sound))
    for row in rows:
        row["equivalent"] = reasons.get(str(row["key"]), "")
    rows.sort(key=lambda row: str(row["key"]))
    result = summary(rows, len(every))
    if out is not None:
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return tell(result)


def mutants_of_all(root: Path, ops: Sequence[str]) -> list[Mutant]:
    """Return the mutants of ops; those of kernels that several share are the first one's."""
    found: dict[str, Mutant] = {}
    for op in ops:
        for mutant in mutants_of(root, op):
            found.setdefault(mutant.key, mutant)
    return list(found.values())


def sample(mutants: Sequence[Mutant], count: int) -> list[Mutant]:
    """Return so many mutants, evenly over ops and kinds; the same ones for the same lines."""
    groups: dict[tuple[str, str], list[Mutant]] = collections.defaultdict(list)
    for mutant in sorted(mutants, key=lambda m: hashlib.sha256(m.key.encode()).digest()):
        groups[mutant.op, mutant.kind].append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < min(count, len(mutants)):
        for group in groups.values():
            if group and len(chosen) < count:
                chosen.append(group.pop())
    return sorted(chosen, key=lambda m: (m.file, m.line, m.key))


def equivalents() -> dict[str, str]:
    """Return the reviewed mutants that change nothing an op may be held to, with the reasons."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {f"{entry['at']}: {entry['edit']}": entry["reason"] for entry in listed}


def examine(op_name: str, steps: Steps) -> None:
    """Prove an op step by step, in this process; say what begins, what it took and what broke."""
    import torch

    from nearlight.workbench import check as checks
    from nearlight.workbench import verdict
    from nearlight.workbench.load import load_op

    torch.set_num_threads(1)
    assert verdict.MAX_SHRINK_STEPS  # a smaller input is of no use here, and costs time
    verdict.MAX_SHRINK_STEPS = 0
    op = load_op(op_name)
    known = [prop for prop in checks.PROPERTIES if prop.name not in COMPILED]
    every = [f"{prop.name}{QUICK}" for prop in known if prop.in_quick]
    every += [prop.name for prop in known]
    for step, sound_s in (steps or dict.fromkeys(every, 0.0)).items():
        print(json.dumps({"step": step}), flush=True)
        limit_s = max(LEAST_LIMIT_S, PATIENCE * sound_s) if steps else 0
        # CPU time, so that a busy machine makes no mutant look like one that hangs.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        start = time.process_time()
        only = [step.removesuffix(QUICK)]
        (found,) = checks.check(op, step.endswith(QUICK), only=only).rows
        seconds = round(time.process_time() - start, 3)
        end = {name: found[name] for name in ("status", "reason")} | {"seconds": seconds}
        print(json.dumps({"step": step, **end}), flush=True)
        if steps and found["status"] == "failed":
            return


def serve(output: Path) -> None:
    """Do jobs from stdin, each in a fork; loading torch and triton anew would take most of it."""
    import nearlight
    from nearlight.workbench import check as _loaded  # noqa: F401 - what every job needs

    assert Path(nearlight.__file__).parent.parent == output.parent, nearlight.__file__
    assert not [name for name in sys.modules if name.startswith("nearlight.ops")]
    for line in sys.stdin:
        job = json.loads(line)
        if (child := os.fork()) == 0:
            code = 1
            try:
                signal.alarm(TIMEOUT_S)
                with output.open("w") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                examine(job["op"], job["steps"])
                code = 0
            except Exception:  # whatever a mutant raises is told by the last line
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Place:
    """Copies of the package, in each of which one mutant is run at a time."""

    def __init__(self, copies: Sequence["Copy"]) -> None:
        self.free: queue.Queue[Copy] = queue.Queue()
        self.num_copies = len(copies)
        for copy in copies:
            self.free.put(copy)

    def sound(self, op: str) -> Steps:
        """Check the op as it is, which must pass; return the steps, the shortest first."""
        copy = self.free.get()
        code, lines, errors = self._child(copy, op, {})
        self.free.put(copy)
        ends = [line for line in lines if "status" in line]
        bad = [line for line in ends if line["status"] == "failed"]
        if code or bad:
            sys.exit(f"{op} is to be sound before it is mutated: {bad or errors}")
        judged = [line for line in ends if line["status"] != "not applicable"]
        # The quick ones first, as one works; then whatever says most per second.
        judged.sort(key=lambda line: (not line["step"].endswith(QUICK), line["seconds"]))
        return {line["step"]: line["seconds"] for line in judged}

    def run(self, mutants: Sequence[Mutant], sound: dict[str, Steps]) -> Iterator[Row]:
        """Yield what came of each mutant."""
        start = time.perf_counter()
        with ThreadPoolExecutor(self.num_copies) as pool:
            rows = pool.map(lambda mutant: self.judge(mutant, sound[mutant.op]), mutants)
            for number, row in enumerate(rows, 1):
                how = f"{row['caught_by'] or 'SURVIVED'} {row['reason']}"
                seconds = time.perf_counter() - start
                print(f"{number}/{len(mutants)} {seconds:.0f} s {row['key']}: {how}", flush=True)
                yield row

    def judge(self, mutant: Mutant, steps: Steps) -> Row:
        """Check one mutant; return its row."""
        copy = self.free.get()
        file = copy.folder / mutant.file
        source = file.read_text(encoding="utf-8")
        start = time.perf_counter()
        try:
            file.write_text(mutant.apply(source), encoding="utf-8")
            code, lines, errors = self._child(copy, mutant.op, steps)
        finally:
            file.write_text(source, encoding="utf-8")
            self.free.put(copy)
        row: Row = {
            name: getattr(mutant, name)
            for name in ("key", "op", "file", "function", "line", "kind", "before", "after")
        }
        step = lines[-1]["step"] if lines else "import"
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            reason = "hangs"
        elif code < 0:
            reason = f"ended by {signal.Signals(-code).name}"
        elif code:
            reason = (errors.strip() or f"exit code {code}").splitlines()[-1]
        else:
            step = step if lines[-1]["status"] == "failed" else ""
            reason = str(lines[-1]["reason"]) if step else ""
        row |= {"caught_by": step, "reason": reason[:160]}
        return row | {"seconds": round(time.perf_counter() - start, 1)}

    def _child(self, copy: "Copy", op: str, steps: Steps) -> tuple[int, list[Row], str]:
        """Return the exit code of a check, the lines it said, and whatever else it wrote."""
        said = copy.ask({"op": op, "steps": steps})
        text = copy.output.read_text(encoding="utf-8", errors="replace")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
        return said, lines, text


class Copy:
    """A copy of the package, and a process that has loaded all of it but the ops."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(root / "nearlight", folder / "nearlight", ignore=ignored)
        paths = [str(folder), str(Path(__file__).parent)]
        self.server = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", str(self.output)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "NEARLIGHT_CACHE": str(folder / "cache"),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    def ask(self, job: Row) -> int:
        """Have a job done in a fork of the process; return its exit code."""
        assert self.server.stdin is not None and self.server.stdout is not None
        print(json.dumps(job), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())


@contextmanager
def bench(root: Path, jobs: int) -> Iterator[Place]:
    """Copy the package for each process at a time; copies and processes go with the block."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies = [Copy(root, Path(scratch) / str(number)) for number in range(jobs)]
        try:
            yield Place(copies)
        finally:
            for copy in copies:
                copy.server.kill()
                copy.server.communicate()


def summary(rows: Sequence[Row], num_mutants: int) -> Row:
    """Return what is committed: totals, by kind and by step, and every row."""
    counted = [row for row in rows if not row["equivalent"]]
    caught = [row for row in counted if row["caught_by"]]
    kinds: dict[str, dict[str, int]] = {}
    for kind in sorted({str(row["kind"]) for row in rows}):
        of_kind = [row for row in rows if row["kind"] == kind]
        kinds[kind] = {
            "run": len(of_kind),
            "equivalent": sum(bool(row["equivalent"]) for row in of_kind),
            "caught": sum(bool(row["caught_by"]) for row in of_kind if not row["equivalent"]),
        }
    from nearlight.core.versions import versions

    return {
        "schema": 1,
        "mutants": num_mutants,
        "run": len(rows),
        "equivalent": len(rows) - len(counted),
        "caught": len(caught),
        "survived": len(counted) - len(caught),
        "share_caught": round(len(caught) / max(len(counted), 1), 4),
        "kinds": kinds,
        "caught_by": dict(collections.Counter(str(row["caught_by"]) for row in caught)),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": list(rows),
    }


def tell(result: Row) -> int:
    """Print the answer and what survived; return the exit code."""
    rows = result["rows"]
    assert isinstance(rows, list)
    contradicted = [row for row in rows if row["equivalent"] and row["caught_by"]]
    for row in contradicted:
        print(f"listed as equivalent, but caught by {row['caught_by']}: {row['key']}")
    for row in rows:
        if not row["equivalent"] and not row["caught_by"]:
            print(f"survived, line {row['line']}, {row['kind']}: {row['key']}")
    share = result["share_caught"]
    assert isinstance(share, float)
    print(
        f"{share:.1%} caught: {result['caught']} of {result['run']} mutants, "
        f"{result['equivalent']} equivalent, {result['survived']} survived"
    )
    return 0 if share >= LEAST_CAUGHT and not contradicted else 1


if __name__ == "__main__":
    sys.exit(main())

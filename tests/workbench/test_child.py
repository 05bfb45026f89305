"""The child of a check: it tells each input before it runs, and runs smaller ones when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from nearlight.workbench.apart import CHILD


def told(file, **request):
    """Return what a child tells of the values of an op."""
    asked = {"name": str(file), "quick": True, "device": "cpu", "only": ["values"], "done": []}
    asked |= {"sanitize": False, "parent": os.getpid(), "fatal": [], "smaller": None, **request}
    read, write = os.pipe()
    with tempfile.TemporaryFile() as trace:
        files = write, trace.fileno()
        command = [sys.executable, "-m", CHILD, *map(str, files), json.dumps(asked)]
        subprocess.run(command, pass_fds=files, check=True)
    os.close(write)
    with os.fdopen(read) as pipe:
        return [json.loads(line) for line in pipe]


def test_each_input_is_told_and_one_that_is_known_to_be_fatal_is_not_run(write_op):
    file = write_op()
    header, chosen, first, *_, row, done = told(file)
    assert header["names"] == {"values": 1} and done["done"]
    assert chosen["mark"] == {} and first["mark"]["shape"] == {"rows": 3, "columns": 5}
    assert row["row"]["status"] == "passed"
    known = {"mark": first["mark"], "reason": "ended", "cause": "c", "line": first["line"]}
    row = told(file, fatal=[known])[-2]["row"]
    assert (row["status"], row["reason"], row["cause"]) == ("failed", "ended", "c")
    smaller = {"prop": "values", "line": first["line"], "sizes": {"rows": 3, "columns": 2}}
    *lines, last = told(file, smaller={**smaller, "tried": [], "may_stray": True})[1:]
    shapes = [line["mark"]["shape"] for line in lines]
    assert shapes == [{"rows": n, "columns": 2} for n in (1, 2)] + [{"rows": 3, "columns": 1}]
    assert last == {"strays": False}

"""The child of a check in a process apart: it tells each input before it runs it.

What it tells goes through a pipe, one line of JSON each; `nearlight.workbench.apart` hears it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nearlight.core.errors import BadInput, MissingPart
from nearlight.workbench import apart


def serve(pipe: int, trace: int, request: Mapping[str, Any]) -> None:
    """Be the child: load the op, prove what is not done yet, tell everything."""
    apart.is_child = True
    for inherited in (pipe, trace):
        os.set_inheritable(inherited, False)
    faulthandler.enable(trace)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _die_with(request["parent"])
    sys.argv = [request["name"]]

    parent = os.fdopen(pipe, "w", encoding="utf-8")
    generation = 0

    def count_generation() -> None:
        nonlocal generation
        generation += 1
        if generation > 1:
            os._exit(1)

    # An op may fork and come back twice. The copy ends when it has something to tell, and has no
    # copies of its own: each call would double them.
    os.register_at_fork(after_in_child=count_generation)

    def tell(**message: Any) -> None:
        if generation:
            os._exit(1)
        print(json.dumps(message), file=parent, flush=True)

    from nearlight.core.machine_code import ARCHES
    from nearlight.workbench import check, fatal, prove, record, verdict
    from nearlight.workbench.load import load_op

    for_record = request.get("for_record", False)
    quick, device, only = request["quick"], request["device"], request["only"]
    try:
        properties = check.chosen(only, quick, request["sanitize"])
        op = load_op(request["name"])
        header = check.describe(op, request["name"], quick, device, only)
        sources = record.sources(op) if for_record else {}
        names = {prop.name: prop.number for prop in properties}
        tell(header=asdict(header), names=names, sources=sources)

        def announce(line: str, reason: str, mark: Mapping[str, Any]) -> None:
            tell(line=line, reason=reason, mark=mark)

        if smaller := request["smaller"]:
            (prop,) = check.chosen([smaller.pop("prop")])
            strays = verdict.try_smaller(prop, op, quick, device, **smaller, announce=announce)
            return tell(strays=strays)
        fatal.known_fatal += [fatal.Fatal(**each) for each in request["fatal"]]
        left = [prop for prop in properties if prop.name not in request["done"]]
        for row in check.each_row(op, left, quick, device, only, request["sanitize"], announce):
            tell(row=asdict(row))
        code = {}
        for arch in ARCHES if for_record else ():
            code[arch] = prove.machine_code(op, arch)
            announce(arch, "", {})
    except (BadInput, MissingPart) as error:
        kind = BadInput if isinstance(error, BadInput) else MissingPart
        return tell(error=[kind.__name__, str(error)])
    tell(machine_code=code, done=True)


def _die_with(parent: int) -> None:
    """End this process when the one that started it is killed (Linux alone knows how)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the check that asked for this is gone")


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))

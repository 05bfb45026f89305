"""How a process ended: in words, of which kind, where, and by what cause."""

from __future__ import annotations

import signal

import pytest
import torch

from nearlight.workbench.ending import Ending, ending_of, hung, place_in


def test_the_place_of_a_death_is_the_innermost_line_of_the_users():
    """Be it in a file that the op imports."""
    frames = (torch.__file__, 3, "call"), ("/home/me/beside.py", 12, "launch"), (__file__, 1, "go")
    trace = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    assert place_in(trace) == "beside.py:12 in launch"
    assert place_in(trace.split("\n")[0]) == ""


@pytest.mark.parametrize(
    ("ending", "text", "is_from_outside", "is_of_memory"),
    [
        (ending_of(0), "ended the process with exit code 0", False, False),
        (ending_of(-signal.SIGSEGV), "ended by SIGSEGV", False, True),
        (ending_of(-signal.SIGINT), "ended by SIGINT", False, False),
        (ending_of(-signal.SIGKILL), "was killed by SIGKILL", True, False),
        (hung(3.0), "did not finish in 3 s", False, False),
    ],
)
def test_an_ending_in_words(ending: Ending, text: str, is_from_outside: bool, is_of_memory: bool):
    assert str(ending) == text
    assert (ending.is_from_outside, ending.is_of_memory) == (is_from_outside, is_of_memory)


def test_the_same_line_or_else_the_same_input_is_the_same_cause():
    here = Ending("did not finish", seconds=60.0, place="k.py:3 in launch")
    again = Ending("did not finish", seconds=16.0, place="k.py:3 in launch")
    assert str(here) == "did not finish in 60 s at k.py:3 in launch"
    assert here.cause({"rows": 3}) == again.cause({"rows": 4})
    crash = ending_of(-signal.SIGSEGV)
    assert crash.cause({"rows": 3}) == crash.cause({"rows": 3}) != crash.cause({"rows": 4})
    assert crash.cause({}) == ""  # while inputs were chosen

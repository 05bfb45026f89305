"""How a process ended, as data; as text it is what a row of a check says."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearlight.core.user_code import is_own

# No code raises these signals by itself: the system, short of memory, or somebody has sent them.
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
# What ends a process whose memory was overwritten, sooner or later and anywhere.
_OF_MEMORY = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        what: in words; two that are alike in these are of one kind.
        signal: name of the signal that ended it, "" for none.
        seconds: how long one was waited for that did not finish; otherwise 0.
        place: the innermost own line that was at work, "" where none is known.
    """

    what: str
    signal: str = ""
    seconds: float = 0.0
    place: str = ""

    def __str__(self) -> str:
        waited = f" in {self.seconds:g} s" if self.seconds else ""
        return self.what + waited + self._at()

    def _at(self) -> str:
        return f" at {self.place}" if self.place else ""

    @property
    def is_from_outside(self) -> bool:
        """Whether it is no code's own doing."""
        return self.signal in _FROM_OUTSIDE

    @property
    def is_of_memory(self) -> bool:
        """Whether a write beyond a tensor ends like this."""
        return self.signal in _OF_MEMORY

    def cause(self, mark: Mapping[str, Any]) -> str:
        """Return its cause: who ends at the same line, or on the same input, has the same."""
        if self.place:
            return self.what + self._at()
        return f"{self.what} on {mark}" if mark else ""


def ending_of(code: int) -> Ending:
    """Return how a process ended by the code that its parent was given."""
    if code >= 0:
        return Ending(f"ended the process with exit code {code}")
    name = signal.Signals(-code).name
    verb = "was killed by" if name in _FROM_OUTSIDE else "ended by"
    return Ending(f"{verb} {name}", name)


def hung(seconds: float) -> Ending:
    """Return the ending of what was waited for so long."""
    return Ending("did not finish", seconds=seconds)


def place_in(trace: str) -> str:
    """Return "my_op.py:12 in launch", the innermost own line of a trace, or ""."""
    for file, number, function in _FRAME.findall(trace):
        if is_own(file):
            return f"{Path(file).name}:{number} in {function}"
    return ""

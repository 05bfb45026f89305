"""Progress of long work on stderr: a spinner in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.status import Status


@contextmanager
def progress(is_quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told what goes on; each line ends with the seconds so far."""
    if is_quiet:
        yield lambda message: None
        return
    start = time.monotonic()
    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:

        def say(message: str) -> None:
            print(f"[{time.monotonic() - start:4.0f} s] {message}", file=sys.stderr, flush=True)

        yield say
        return
    with console.status("starting") as status:
        yield _Terminal(console, status, start)


@dataclass(frozen=True)
class _Terminal:
    """Prints a line of what is done, above one that is overwritten by what is at work."""

    console: Console
    status: Status
    start: float

    def __call__(self, message: str) -> None:
        seconds = time.monotonic() - self.start
        line = f"[{seconds:4.0f} s] {message}"
        self.console.print(line, style="dim", markup=False, highlight=False)
        self.current(message)

    def current(self, message: str) -> None:
        self.status.update(escape(message))

"""Progress of long work on stderr: a spinner in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


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

        def show(message: str) -> None:
            console.print(
                f"[{time.monotonic() - start:4.0f} s] {message}",
                style="dim",
                markup=False,
                highlight=False,
            )
            status.update(message)

        yield show

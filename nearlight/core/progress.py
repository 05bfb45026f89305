"""How long work tells what it is at: one line a step, drawn by whoever called."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def show_current(progress: Progress, message: str) -> None:
    """Show what is at work now until the next line, where a line can be overwritten."""
    getattr(progress, "current", silent)(message)


def silent(message: str) -> None:
    """Tell nobody; the default of everything that takes a `Progress`."""

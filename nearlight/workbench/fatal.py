"""Inputs that have ended a process or did not come back: known, they are not run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nearlight.workbench.trial import Trial


@dataclass(frozen=True)
class Fatal:
    """An input that has ended the process or did not come back: known, it is not run again.

    Attributes:
        mark: of the input.
        reason, cause, line: of the row that it has failed, and what runs it again.
    """

    mark: Mapping[str, Any]
    reason: str
    cause: str
    line: str


class IsFatal(Exception):
    """An input is not run, for it is known to be fatal."""

    def __init__(self, fatal: Fatal) -> None:
        super().__init__(fatal.reason)
        self.fatal = fatal


# Those known to this process.
known_fatal: list[Fatal] = []


def mark(trial: Trial) -> dict[str, Any]:
    """Return what makes an input, in types of JSON, but for the numbers that it holds."""
    case = trial.case
    made = {"shape": dict(case.shape), "dtype": str(case.dtype), "options": repr(case.options)}
    return {**made, "layouts": dict(trial.layouts), "step": trial.step}


def refuse_fatal(trial: Trial) -> None:
    """Raise IsFatal if an input is known to be, as it is or with nothing done to it."""
    marks = [mark(trial), mark(replace(trial, layouts={}, step=""))] if known_fatal else []
    for fatal in known_fatal:
        if fatal.mark in marks:
            raise IsFatal(fatal)

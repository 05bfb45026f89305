"""What a fix is: a name, how exact it is, and how it is applied to a live model and undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

Undo = Callable[[], None]


@dataclass(frozen=True)
class Fix:
    """One change of a program.

    Attributes:
        name: what findings call it ("patch:rms_norm").
        kind: exact fixes pass the tolerance rule; approximate ones are named by the user.
        apply: changes a live model in place and returns what undoes it exactly; fixes are undone
            in reverse order. Where the model has nothing to change it raises `NothingToDo`.
    """

    name: str
    kind: Literal["exact", "approximate"]
    apply: Callable[[nn.Module], Undo]


class NothingToDo(Exception):
    """The model has no place for this fix; the message says why."""

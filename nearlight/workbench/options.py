"""A case's options on their way to the op's function, or to its `make_inputs`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nearlight.core.op import Case, Op
from nearlight.workbench.bad_source import BadSource


class _Options(dict[str, Any]):
    """A case's options, which note what is read of them; who goes through all reads all."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.options)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return dict(self.items()).values()

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | other


def noting(case: Case) -> tuple[Case, _Options]:
    """Return a case whose options note what is read of them, and these options."""
    options = _Options(case)
    return replace(case, options=options), options


def accepted(op: Op, case: Case, options: _Options) -> dict[str, Any]:
    """Return the options that the op's function accepts.

    Raises:
        BadSource: an option that it does not accept and `make_inputs` has not read.
    """
    parameters = inspect.signature(op.function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    read = set(options.read)
    found = {}
    for name, value in case.options.items():
        if takes_any or name in parameters:
            found[name] = value
        elif name not in read:
            near = difflib.get_close_matches(name, parameters, 1)
            raise BadSource(
                f"{op.name}: case {case.name} has the option {name!r}, which its function does "
                "not accept and make_inputs does not read; "
                f"{'nearest' if near else 'accepted are'}: {', '.join(near or parameters)}"
            )
    return found

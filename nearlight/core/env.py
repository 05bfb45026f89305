"""Every environment variable nearlight reads, typed, with its default and its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearlight.core.errors import BadInput


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default, parser and why it exists."""

    name: str
    default: str
    parse: Callable[[str], Any]
    reason: str

    def read(self) -> Any:
        """Return the parsed value, of the default where it is unset; BadInput if it has none."""
        text = os.environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError as error:
            raise BadInput(f"{self.name}={text!r}: {error}") from None


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"allowed are {', '.join(allowed)}")
        return text

    return parse


def _switch(text: str) -> bool:
    return _one_of("on", "off")(text) == "on"


def _folder(text: str) -> Path:
    if text:
        folder = Path(text).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ValueError("this is a file; name a folder")
        return folder
    import platformdirs

    return Path(platformdirs.user_cache_dir("nearlight"))


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("NEARLIGHT", "on", _switch, "off: patch and optimize change nothing"),
        Variable(
            "NEARLIGHT_BACKEND",
            "auto",
            _one_of("auto", "triton", "reference"),
            "forces one backend for every op (the proofs and the tests set it)",
        ),
        Variable(
            "NEARLIGHT_CACHE",
            "",
            _folder,
            "folder for compiled kernels and converted weights (default: the user's cache folder); "
            "where it cannot be written, kernels are compiled anew by each process",
        ),
        Variable(
            "NEARLIGHT_TUNED",
            "on",
            _switch,
            "off: launches follow the ops' own rules, whatever `nearlight tune` found",
        ),
    )
}


def read(name: str) -> Any:
    """Return the typed value of one of `VARIABLES`."""
    return VARIABLES[name].read()

"""Compiled kernels on disk: an entry is whole or counts as absent, and no fault stops a compile.

An entry is one line, the sha256 of its name and content, and the content after it. It is written
aside and renamed, so any number of processes may store the same kernel at once.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from pathlib import Path

from nearlight.core import env
from nearlight.core.report import write_aside


def entry_of(kind: str, digest: str) -> Path:
    """Return where NEARLIGHT_CACHE keeps an entry; kind is "cuda" or "triton"."""
    return Path(env.read("NEARLIGHT_CACHE")) / kind / digest


def load(entry: Path) -> bytes | None:
    """Return the content of an entry; None where it is absent, unreadable or damaged."""
    try:
        checksum, _, content = entry.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(entry, content) else None


def store(entry: Path, content: bytes) -> None:
    """Write an entry; a folder that cannot be written is one warning, not an error."""
    try:
        write_aside(entry, _checksum(entry, content) + b"\n" + content)
    except OSError as error:
        _warn(entry.parent, error.strerror or str(error))


def _checksum(entry: Path, content: bytes) -> bytes:
    return hashlib.sha256(entry.name.encode() + b"\0" + content).hexdigest().encode()


@cache
def _warn(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels are not kept: {folder}: {reason}; each process compiles anew until "
        "NEARLIGHT_CACHE names a folder that can be written",
        stacklevel=2,
    )

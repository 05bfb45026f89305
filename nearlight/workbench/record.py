"""The record of an op's proof: what was proved, with which sources, and when it is out of date."""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nearlight
from nearlight.core.op import Op
from nearlight.core.report import write_aside
from nearlight.workbench.properties import PROPERTIES

SCHEMA = 1
PACKAGE = Path(nearlight.__file__).parent
FOLDER = PACKAGE / "data" / "proofs"
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def sources(op: Op) -> dict[str, str]:
    """Return the sha256 of each of an op's own files, by its path in the repository.

    Own are: the op's file or folder, what it imports from other ops, a `.cu` file beside it, and
    the headers of nearlight these include. `core/` is not: when it changes, all is proved again.
    """
    digests = {_label(file): _digest(file) for file in _closure(_own_files(op))}
    return dict(sorted(digests.items()))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return where the record of an op lies."""
    return folder / f"{name}.json"


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the record of an op, or None where there is none."""
    file = path_of(name, folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def save(record: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write a record; aside first, then renamed."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    write_aside(path_of(record["op"], folder), text + "\n")


def stale(op: Op, folder: Path = FOLDER) -> str:
    """Say why an op has to be proved again, or return "" where its record still holds."""
    record = load(op.name, folder)
    if record is None:
        return "it was never proved"
    if record.get("schema") != SCHEMA:
        return f"its record has schema {record.get('schema')}, this is {SCHEMA}"
    now, then = sources(op), record["sources"]
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if changed:
        return f"{', '.join(sorted(changed))} differs from what was proved"
    proved = {row["property"] for row in record["properties"]}
    missing = [prop.name for prop in PROPERTIES if prop.name not in proved]
    if missing:
        return f"{', '.join(missing)} was never proved"
    return "" if record["passed"] else "its last proof failed"


def drawn_today(
    names: Sequence[str], count: int = 2, date: datetime.date | None = None
) -> list[str]:
    """Return the ops that are proved today although nothing changed: a draw that the date decides.

    Args:
        names: all ops.
        count: how many are drawn.
        date: today (UTC) by default.
    """
    day = (date or datetime.datetime.now(datetime.UTC).date()).isoformat()
    return sorted(names, key=lambda name: hashlib.sha256(f"{day} {name}".encode()).digest())[:count]


def due(ops: Mapping[str, Op], folder: Path = FOLDER) -> dict[str, str]:
    """Return the ops whose full check has to run now, each with the reason."""
    reasons = {name: reason for name, op in ops.items() if (reason := stale(op, folder))}
    return {**dict.fromkeys(drawn_today(list(ops)), "drawn by date"), **reasons}


def _own_files(op: Op) -> list[Path]:
    spec = None
    if op.reference.__module__.startswith("nearlight.ops."):
        spec = importlib.util.find_spec(".".join(op.reference.__module__.split(".")[:3]))
    if spec is not None and spec.origin is not None:
        return _with_neighbours(Path(spec.origin), is_package=bool(spec.submodule_search_locations))
    file = getattr(sys.modules[op.reference.__module__], "__file__", None)
    if file is None:
        raise ValueError(f"{op.name}: its reference is defined in no file, so nothing can be kept")
    return _with_neighbours(Path(file), is_package=False)


def _with_neighbours(file: Path, is_package: bool) -> list[Path]:
    if is_package:
        kinds = (".py", ".cu", ".cuh")
        return [found for found in file.parent.rglob("*") if found.suffix in kinds]
    device_file = file.with_suffix(".cu")
    return [file, device_file] if device_file.is_file() else [file]


def _closure(files: Sequence[Path]) -> set[Path]:
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop().resolve()
        if file not in found:
            found.add(file)
            waiting += _imported(file) if file.suffix == ".py" else _included(file)
    return found


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files of other ops that a Python file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if not name.startswith("nearlight.ops."):
                continue
            base = PACKAGE.parent.joinpath(*name.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate.is_file():
                    yield candidate


def _included(file: Path) -> Iterator[Path]:
    """Yield the headers of nearlight or of the op that a CUDA file includes."""
    for name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
        for folder in (file.parent, PACKAGE / "core" / "include"):
            if (folder / name).is_file():
                yield folder / name
                break


def _label(file: Path) -> str:
    is_ours = file.is_relative_to(PACKAGE)
    return file.relative_to(PACKAGE.parent).as_posix() if is_ours else file.name


def _digest(file: Path) -> str:
    # A checkout on another system may write other line endings; nothing else is forgiven.
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()

"""The record of an op's proof: what was proved, with which sources, and when it is out of date."""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nearlight
from nearlight.core import cuda_sources
from nearlight.core.op import Op
from nearlight.core.report import write_aside
from nearlight.core.user_code import is_own, package_root, split_name
from nearlight.core.versions import versions
from nearlight.workbench.load import source_of
from nearlight.workbench.properties import PROPERTIES
from nearlight.workbench.property import plural

SCHEMA = 1
PACKAGE = Path(nearlight.__file__).parent
FOLDER = PACKAGE / "data" / "proofs"
OPS = PACKAGE / "ops" / "__init__.py"
# Stands for the digest of a `.cu` file that may be made of more than can be known.
MACRO_HEADER = "includes a header by a macro, which only the compiler can follow"
_DIFFERS = "differs from what was proved"


def sources(op: Op) -> dict[str, str]:
    """Return the sha256 of each of an op's own files, by its path in the repository.

    Own are: the op's file or folder, what it imports from other ops, a `.cu` file beside it, and
    the headers of nearlight these include. `core/` is not: when it changes, all is proved again.
    With a `.cu` file go the versions of the packages that bring its compiler and CUDA's headers.
    """
    files = _own_files(op)
    return _digests(files, files[0].parent)


def _digests(files: Sequence[Path], home: Path) -> dict[str, str]:
    found = _closure(files)
    brought = cuda_sources.package_versions() if any(f.suffix != ".py" for f in found) else {}
    return dict(sorted({**{_label(f, home): _digest(f) for f in found}, **brought}.items()))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return where the record of an op lies."""
    return folder / f"{name}.json"


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the record of an op, or None where there is none."""
    file = path_of(name, folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def save(record: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write the record of an op."""
    write(record, path_of(record["op"], folder))


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record; aside first, then renamed."""
    write_aside(path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def file_of(source: str) -> Path | None:
    """Return the file of "my_op.py" or "my_op.py:NAME"; None for the name of an op."""
    file, _ = split_name(source)
    return file and file.resolve()


def beside(source: str, device: str = "cpu") -> Path:
    """Return where the record of a user's op lies: beside "my_op.py", by file, name and device."""
    file = file_of(source)
    assert file is not None
    attribute = split_name(source)[1] or "OP"
    where = "" if device == "cpu" else f".{device.replace(':', '')}"
    return file.parent / ".nearlight" / "proofs" / f"{file.stem}.{attribute}{where}.json"


def file_sources(file: Path) -> dict[str, str]:
    """Return the sha256 of a user's file, of all of theirs that it imports, and of its `.cu`.

    With a `.cu` file go the same versions as in `sources`.
    """
    return _digests(_with_neighbours(file, is_package=False), file.parent)


def outdated(path: Path, now: Mapping[str, str], quick: bool, device: str) -> str:
    """Say why a user's op has to be proved again, or return "" where its record still holds."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] != device:
            return f"it was proved on {record['device']}, this is {device}"
        then = record["versions"]
        for name, version in versions(on_gpu=device != "cpu").items():
            if name not in ("date", "commit") and then.get(name) != version:
                return f"{name} was {then.get(name)} and is {version}"
        return _outdated(record, now, quick)
    except (OSError, ValueError, KeyError, TypeError):
        return "it has no record that can be read"


def stale(op: Op, folder: Path = FOLDER) -> str:
    """Say why an op has to be proved again, or return "" where its record still holds."""
    record = load(op.name, folder)
    if record is None:
        return "it was never proved"
    return _outdated(record, sources(op), quick=False)


def _outdated(record: Mapping[str, Any], now: Mapping[str, str], quick: bool) -> str:
    if record.get("schema") != SCHEMA:
        return f"its record has schema {record.get('schema')}, this is {SCHEMA}"
    then = record["sources"]
    if unfollowed := [name for name, digest in now.items() if digest == MACRO_HEADER]:
        return f"{', '.join(unfollowed)} {MACRO_HEADER}"
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if changed:
        return f"{', '.join(sorted(changed))} {_DIFFERS}"
    proved = {row["property"] for row in record["properties"]}
    wanted = [prop.name for prop in PROPERTIES if prop.in_quick or not quick]
    missing = [name for name in wanted if name not in proved]
    if missing:
        return f"{', '.join(missing)} was never proved"
    return "" if record["passed"] else "its last proof failed"


def in_brief(reason: str) -> str:
    """Return a reason of `stale` with how many sources differ instead of which."""
    names, differs, _ = reason.partition(f" {_DIFFERS}")
    number = len(names.split(", "))
    return f"{plural(number, 'source')} differ{'s' * (number == 1)}" if differs else reason


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
    source = source_of(op)
    if (file := file_of(source)) is not None:
        return _with_neighbours(file, is_package=False)
    spec = importlib.util.find_spec(f"nearlight.ops.{source}") if source else None
    if spec is None or spec.origin is None:
        raise ValueError(f"{op.name}: its reference is defined in no file, so nothing can be kept")
    return _with_neighbours(Path(spec.origin), is_package=bool(spec.submodule_search_locations))


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
        file = waiting.pop()
        # its folder resolved, not itself: headers beside a link are looked for beside it
        file = file.parent.resolve() / file.name
        if file not in found:
            found.add(file)
            waiting += _imported(file) if file.suffix == ".py" else _included(file)
    return found


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files of other ops and of the user's that a Python file imports or names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # it imports nothing, and its own digest stands for it
    root, package = package_root(file)
    roots = [root, file.parent, *(Path(p) for p in sys.path if is_own(f"{p}/"))]
    if package:  # what it stands in is imported before it
        yield from _modules(root, f"{package}.{file.stem}")
    for node in ast.walk(tree):
        names, places = [], roots
        if isinstance(node, ast.Constant) and str(node.value).endswith((".cu", ".cuh")):
            yield from filter(Path.is_file, [file.parent / str(node.value)])
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            places = [[file, *file.parents][node.level]] if node.level else roots
            base = f"{node.module}." if node.module else ""
            names = [base + alias.name for alias in node.names]
        for name in names:
            is_ours = name.startswith("nearlight.")
            found = (list(_modules(p, name)) for p in ([PACKAGE.parent] if is_ours else places))
            yield from next(filter(None, found), ())


def _modules(place: Path, name: str) -> Iterator[Path]:
    """Yield the files of "a.b.c" below a folder, those of the packages on the way included."""
    candidates = []
    for part in name.split("."):
        place /= part
        candidates += [place.with_name(f"{part}.py"), place / "__init__.py"]
    # Of nearlight itself, whose version is kept, an op alone is followed.
    yield from (c for c in candidates if is_own(str(c)) and c != OPS and c.is_file())


def _included(file: Path) -> list[Path]:
    _, *headers = cuda_sources.sources(file)
    return [Path(header) for header in headers]


def _label(file: Path, home: Path) -> str:
    root = PACKAGE.parent if file.is_relative_to(PACKAGE) else home
    return Path(os.path.relpath(file, root)).as_posix()


def _digest(file: Path) -> str:
    if file.suffix == ".cu" and cuda_sources.has_macro_header(cuda_sources.sources(file)):
        return MACRO_HEADER
    # A checkout on another system may write other line endings; nothing else is forgiven.
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()

"""Answers of `inspect` kept on disk: asked again, nothing is compiled and torch is not imported.

An answer holds as long as everything it was made from: the options, the environment, versions,
tuned rows, and every file that took part (modules outside of installed packages, files read below
the target's folder, CUDA C++ sources with all headers in reach that no package brings).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nearlight
from nearlight.core import compile_cache, cuda_sources, tuned
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Finding, Report
from nearlight.core.user_code import split_name

_PACKAGES = ("torch", "cuda-core", "nvidia-cuda-nvdisasm")  # and those of CUDA's headers
_VARIABLES = ("NEARLIGHT_", "TRITON_", "CUDA", "PYTHON")
# Files that Python opened for reading, while somebody collects them.
_opened: set[str] | None = None


def inspect_kept(
    target: str,
    archs: Sequence[str] | None = None,
    other: str | None = None,
    *,
    block: int = 0,
    shared: int = 0,
    types: str = "",
    constants: str = "",
    progress: Progress = silent,
) -> Report:
    """Return the answer of `nearlight.workbench.inspect.inspect`, kept if it still holds.

    Takes the same arguments and raises the same errors; errors are not kept.
    """
    asked = (target, archs and list(archs), other, block, shared, types, constants)
    digest = hashlib.sha256(repr((asked, _surroundings())).encode()).hexdigest()
    entry = compile_cache.entry_of("inspect", f"{digest}.json")
    if (content := compile_cache.load(entry)) is not None:
        kept = json.loads(content)
        if kept["files"] == _digests(kept["files"], kept["sources"]):
            return _from_dict(kept["report"])
    with _collecting() as opened:
        from nearlight.workbench.inspect import inspect

        report = inspect(
            target,
            archs,
            other,
            block=block,
            shared=shared,
            types=types,
            constants=constants,
            progress=progress,
        )
    paths = [split_name(name)[0] for name in (target, other) if name]
    folders = {path.absolute().parent for path in paths if path and path.is_file()}
    read = {name for name in opened if folders & set(Path(name).absolute().parents)}
    sources = {str(Path(name).absolute()) for name in opened if name.endswith(".cu")}
    files = _digests(read | set(_own_modules()), sources)
    if any(cuda_sources.has_macro_header(cuda_sources.sources(Path(name))) for name in sources):
        return report  # only the compiler knows the header that a macro names
    kept = {"files": files, "sources": sorted(sources), "report": report.to_dict()}
    compile_cache.store(entry, json.dumps(kept).encode())
    return report


def _surroundings() -> tuple[Any, ...]:
    """Return what an answer depends on beside its files."""
    folders = [path("", "").parent for path in (tuned.user_path, tuned.package_path)]
    rows = [path for folder in folders for path in sorted(folder.rglob("*.json"))]
    return (
        nearlight.__version__,
        sys.version,
        str(Path.cwd()),
        [_version(package) for package in _PACKAGES],
        cuda_sources.package_versions(),
        sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)),
        [(str(path), _digest(path)) for path in rows],
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digests(names: Iterable[str], sources: Iterable[str]) -> dict[str, str]:
    """Return the digests of files, of CUDA C++ sources and of the headers these reach now."""
    reached: dict[str, str] = {}
    for source in sources:
        if Path(source).is_file():
            _, *headers = cuda_sources.sources(Path(source))
            reached |= dict.fromkeys((source, *headers), "")
    return {name: _digest(Path(name)) for name in sorted({*names, *reached})}


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _own_modules() -> Iterator[str]:
    """Yield the files of loaded modules that no installer put there: versions do not cover them."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(installed):
            yield file


@contextmanager
def _collecting() -> Iterator[set[str]]:
    """Collect the names of files that Python opens for reading inside the block."""
    global _opened
    _opened = set()
    _listen()
    try:
        yield _opened
    finally:
        _opened = None


@cache
def _listen() -> None:
    sys.addaudithook(_hear)  # there is no taking it away again, so once a process


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        path, mode, _ = arguments
        if isinstance(path, str) and mode and "r" in mode:
            _opened.add(path)


def _from_dict(values: dict[str, Any]) -> Report:
    findings = tuple(Finding(**finding) for finding in values["findings"])
    fields = {key: value for key, value in values.items() if key not in ("schema", "mode")}
    return Report(**{**fields, "findings": findings})

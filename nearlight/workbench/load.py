"""Ops by name and by file: loaded, and found again from their records."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nearlight.core.errors import BadInput, one_line
from nearlight.core.op import Case, Op
from nearlight.core.user_code import (
    PREFIX,
    added_folders,
    is_own,
    package_root,
    place_of,
    split_name,
)
from nearlight.workbench.apart import is_ctrl_c


def load_op(name: str) -> Op:
    """Return an Op record by the name of an op, or from a file.

    Args:
        name: "rms_norm", "my_op.py" (its `OP`) or "my_op.py:NAME".

    Raises:
        BadInput: no such op, file or record; the nearest names are offered.
    """
    file, attribute = split_name(name)
    if file is not None:
        if file.suffix == ".cu":
            raise BadInput(f"{name}: an op is named by the Python file that launches {file.name}")
        return _record(load_file(file), attribute or "OP", str(file))
    from nearlight.ops import OPS  # all kernels: a file of the user's needs none of them

    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, 3) or OPS
        raise BadInput(
            f"no op called {name!r}; nearest: {', '.join(near)}. "
            "An op of your own is named by its file: my_op.py or my_op.py:NAME"
        )
    return OPS[name]


def load_file(file: Path) -> ModuleType:
    """Import a file of the user's; BadInput with file and line where that fails."""
    if not file.is_file():
        raise BadInput(f"no file {file}" + f" in {Path.cwd()}" * (not file.is_absolute()))
    # Found last and under a name of its own, so that a file called torch.py hides nothing.
    root, package = package_root(file)
    _put_before_others([str(root), str(file.resolve().parent)])
    anchor = f"{PREFIX}{zlib.crc32(str(root).encode()):08x}"
    sys.modules.setdefault(anchor, ModuleType(anchor)).__path__ = [str(root)]
    package = ".".join(filter(None, (anchor, package)))
    name = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        importlib.import_module(package)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if is_ctrl_c(error):
            raise
        told = _lacking(error) or one_line(error)
        raise BadInput(f"{place_of(error, is_long=True) or file}: {told}") from error
    return module


def _put_before_others(folders: Sequence[str]) -> None:
    """Let a file import its own neighbours, not those of files loaded before by the same names."""
    others = [p for p in added_folders if p in sys.path and p not in folders]
    own = [p for p in dict.fromkeys(folders) if p in added_folders or p not in sys.path]
    sys.path[:] = [p for p in sys.path if p not in added_folders] + own + others
    added_folders[:] = own + others
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_theirs = file.startswith(tuple(f"{p}/" for p in others))
        if is_theirs and not name.startswith(PREFIX):
            mine = _module_file(own, name) or _module_file(own, name.partition(".")[0])
            if mine not in ("", file):
                del sys.modules[name]


def _module_file(folders: Sequence[str], name: str) -> str:
    """Return the file that one of the folders has for "a.b", or ""."""
    stem = name.replace(".", "/")
    places = (Path(p, f"{stem}{end}") for p in folders for end in (".py", "/__init__.py"))
    return next((str(place) for place in places if place.is_file()), "")


def _lacking(error: BaseException) -> str:
    """Say which parts of a record a file lacks and what they are, or return ""."""
    names: list[str] = []
    if isinstance(error, NameError) and error.name in ("reference", "make_inputs"):
        names = [error.name]
    elif isinstance(error, TypeError) and str(error).startswith("Op.__init__() missing"):
        names = re.findall(r"'(\w+)'", str(error))
    about = " ".join((Op.__doc__ or "").split())
    parts = (re.search(rf" {name}: (.*?)\.? (?=\w+: )", about) for name in names)
    told = [f"{n}: give it {part[1]}" for n, part in zip(names, parts, strict=True) if part]
    return f"Op(...) lacks {', and '.join(told)}" if told else ""


def _record(module: ModuleType, attribute: str, where: str) -> Op:
    record = getattr(module, attribute, None)
    if not isinstance(record, Op):
        found = [name for name, value in vars(module).items() if isinstance(value, Op)]
        hint = f"it has {', '.join(found)}" if found else "define OP = Op(...)"
        raise BadInput(f"{where} has no Op record called {attribute}; {hint}")
    for part in ("function", "reference", "make_inputs"):
        if not callable(value := getattr(record, part)):
            raise BadInput(f"{where}: {attribute} has {part}={value!r}; give it a function")
    for part in ("cases", "check_cases", "large_cases"):
        cases = getattr(record, part)
        listed = cases if isinstance(cases, Sequence) else [cases]
        if wrong := [repr(case)[:80] for case in listed if not isinstance(case, Case)]:
            raise BadInput(f"{where}: {attribute} has {wrong[0]} in its {part}, allowed are Cases")
        for case in listed:
            if wrong_part := _wrong_part(case):
                raise BadInput(f"{where}: {attribute} has a case {case.name!r} with {wrong_part}")
    if not record.check_cases:
        raise BadInput(f"{where}: {attribute} has no check_cases; give it at least one small Case")
    return record


def _wrong_part(case: Case) -> str:
    """Say what of a case is of a wrong type, and what it has to be, or return ""."""
    if not isinstance(case.shape, Mapping):
        return f"shape={case.shape!r}, allowed is a dict of sizes by name"
    for name, size in case.shape.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            return f"{name}={size!r} in its shape, allowed are whole numbers from 0"
    if not isinstance(case.dtype, torch.dtype):
        return f"dtype={case.dtype!r}, allowed is a torch.dtype such as torch.bfloat16"
    if not isinstance(case.options, Mapping):
        return f"options={case.options!r}, allowed is a dict of the function's arguments by name"
    return ""


def source_of(op: Op) -> str:
    """Return what `load_op` takes to find this op again, or "" where no file holds it."""
    return home_of(op) or _home(op, lambda other: _definition(other) == _definition(op))


def _definition(op: Op) -> tuple[Any, ...]:
    """Return what stays the same when a file is loaded once more."""
    makers = map(inspect.unwrap, (op.function, op.reference))
    codes = (getattr(maker, "__code__", maker) for maker in makers)
    extremes = [extreme.name for extreme in op.extremes]
    return op.name, *codes, op.check_cases, op.refused_layouts, extremes


def home_of(op: Op) -> str:
    """Return what `load_op` takes to find this very record, or "" where no file holds it."""
    return _home(op, lambda other: other is op)


def _home(op: Op, is_it: Callable[[Op], bool]) -> str:
    _, *codes = _definition(op)[:3]
    written_in = {getattr(code, "co_filename", "") for code in codes}
    found: dict[str, bool] = {}
    loaded = [m for name, m in sys.modules.items() if name.startswith(PREFIX)]
    for module in reversed([*sys.modules.values(), *loaded]):
        file = getattr(module, "__file__", None)
        if not file or not is_own(file):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, Op) and is_it(value):
                if module.__name__.startswith("nearlight.ops."):
                    return op.name
                found.setdefault(f"{file}:{name}", file in written_in)
    # Others may have imported the record from where its function or its reference is written; of
    # several that did not write them, the last import is the first to have had it.
    return max(found, key=lambda home: found[home], default="")

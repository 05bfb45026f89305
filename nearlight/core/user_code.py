"""The user's own code: how a target names it, which files it is, where in it an error arose."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

import nearlight

# The name that a module loaded from a user's file begins with.
PREFIX = "nearlight_user_"
# On `sys.path` for the neighbours of such files; the file loaded last has its own first.
added_folders: list[str] = []
_PACKAGE = f"{Path(nearlight.__file__).parent}/"
_OPS = f"{_PACKAGE}ops/"
# "<string>" and the like are no files.
_NOT_OWN = ("<", _PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# Triton may lie in a folder that PYTHONPATH names; looking for it does not import it.
_found = find_spec("triton")
_TRITON = f"{Path(_found.origin).parent}/" if _found and _found.origin else _PACKAGE
# Wherever they lie: of the environment, of the user, of the system.
_INSTALLED = ("/site-packages/", "/dist-packages/")


def split_name(name: str) -> tuple[Path | None, str]:
    """Return the file and the rest of "file.py:NAME" or "file.cu:ns::kernel<float>".

    Where no file is named, the file is None and the rest is all of it.
    """
    match = re.fullmatch(r"(.*?\.(?:cu|py))(?::(.*))?", name)
    return (Path(match[1]), match[2] or "") if match else (None, name)


def is_own(file: str) -> bool:
    """Return whether a file is an op's or the user's: no part of Python, of us, of a package."""
    is_part = file.startswith((*_NOT_OWN, _TRITON))
    is_installed = is_part or any(part in file for part in _INSTALLED)
    return file.startswith(_OPS) or not is_installed


def place_of(error: BaseException, is_long: bool = False) -> str:
    """Return "my_op.py:12 in launch", the innermost own line that an error came through, or "".

    Long it is "/home/me/my_op.py:12", and of a SyntaxError the line that has it.
    """
    if is_long and isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    if not own:
        return ""
    file, line, function, _ = own[-1]
    return f"{file}:{line}" if is_long else f"{Path(file).name}:{line} in {function}"


def running_place() -> str:
    """Return "my_op.py:12 in launch", the innermost own line that is running, or ""."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if is_own(file := frame.f_code.co_filename):
            return f"{Path(file).name}:{line} in {frame.f_code.co_name}"
    return ""


def package_root(file: Path) -> tuple[Path, str]:
    """Return the folder where a file's package begins, and the package's dotted name or ""."""
    folder, package = file.resolve().parent, ""
    while (folder / "__init__.py").is_file():
        package = f"{folder.name}.{package}" if package else folder.name
        folder = folder.parent
    return folder, package

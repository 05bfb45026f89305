"""`new`: write a complete op and its test, which pass the check as they stand."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from nearlight.core.errors import BadInput, one_line
from nearlight.core.report import Report, require_writable, write_aside
from nearlight.core.user_code import is_own

LANGUAGES = {"triton": "Triton", "cuda": "CUDA C++"}
TEMPLATES = Path(__file__).parent / "templates"
OPS = Path(__file__).parents[1] / "ops"
# What a comment "EDIT n of 3" of the op file asks for.
EDITS = ("what it computes", "the kernels and their launch", "the function, inputs and cases")


def new(name: str, lang: str, folder: Path = Path()) -> Report:
    """Write an op of one's own: `<name>.py`, `<name>.cu` where asked for, and `test_<name>.py`.

    Args:
        name: of the op, its file and its function.
        lang: "triton" or "cuda".
        folder: where the files go; made where it is missing.

    Returns:
        A report with the three places to edit.

    Raises:
        BadInput: a name or language that will not do, a file that exists, a folder that cannot be
            written; then nothing is.

    Example:
        >>> from nearlight.workbench.new import new
        >>> print(new("my_op", "triton").next)  # doctest: +SKIP
        nearlight check my_op.py
    """
    if lang not in LANGUAGES:
        raise BadInput(f"--lang {lang!r}: allowed are {', '.join(LANGUAGES)}")
    if reason := _unfit(name, lang, folder):
        raise BadInput(f"an op cannot be called {name!r}: {reason}")
    texts = {folder / file: text for file, text in render(name, lang).items()}
    for path in texts:
        if path.exists():
            raise BadInput(f"{path} exists; choose another name or --dir, or remove it first")
        require_writable(path)
    try:
        for path, text in texts.items():
            write_aside(path, text)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {one_line(error)}") from None
    return Report(
        verb="new",
        answer=f"{name}: a complete op in {LANGUAGES[lang]}, with its test",
        target=name,
        setup=f"written: {', '.join(map(str, texts))}",
        rows=_places(texts),
        next=f"nearlight check {shlex.quote(str(folder / f'{name}.py'))}",
    )


def render(name: str, lang: str) -> dict[str, str]:
    """Return the text of each file of an op by its name."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    names = {f"{name}.py": "op.py", f"{name}.cu": "op.cu", f"test_{name}.py": "test_op.py"}
    if lang != "cuda":
        del names[f"{name}.cu"]
    return {
        file: environment.get_template(f"{template}.jinja").render(op=name, lang=lang)
        for file, template in names.items()
    }


def _unfit(name: str, lang: str, folder: Path) -> str:
    """Say why an op cannot have this name, or return ""."""
    if not re.fullmatch(r"(?!test_)[a-z][a-z0-9_]{0,63}", name) or keyword.iskeyword(name):
        return "allowed is an identifier of up to 64 lower-case letters, not to begin with test_"
    if name in ("conftest", "setup"):
        return "pytest or pip runs a file of this name by itself"
    found = importlib.util.find_spec(name)
    # The user's own, as from the folder that `python -m` begins in, is no part of Python.
    is_theirs = found is not None and not (found.has_location and is_own(str(found.origin)))
    if hasattr(builtins, name) or is_theirs:
        return "Python has something of this name, which the op would hide"
    if name in {path.stem for path in OPS.iterdir()}:
        return "nearlight has an op of this name, and results are kept by name"
    source = ast.parse(render("placeholder", lang)["placeholder.py"])
    used = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
    used |= {node.arg for node in ast.walk(source) if isinstance(node, ast.arg)}
    return "the op's file uses this name for something else" if name in used else ""


def _places(texts: Mapping[Path, str]) -> list[dict[str, str]]:
    """Return where each edit begins, and the whole .cu file beside the second."""
    rows = []
    for number, what in enumerate(EDITS, 1):
        marker = f"EDIT {number} of {len(EDITS)}"
        places = [
            f"{path}:{line}"
            for path, text in texts.items()
            for line, content in enumerate(text.splitlines(), 1)
            if marker in content
        ]
        rows.append({"edit": what, "where": ", ".join(places)})
    return rows

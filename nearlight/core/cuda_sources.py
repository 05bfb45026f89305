"""What the machine code of a .cu file is made of: its own text and every header in reach."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"

# Also `__has_include(<x>)` and `#include_next`: a header too many only compiles once more.
_HEADER = re.compile(r'include(?:_next)?(?:\s|/\*.*?\*/|\()*(?:"([^"\n]+)"|<([^>\n]+)>)', re.DOTALL)
# Comments, literals and joined lines; a literal may hold what looks like a comment or a kernel.
NO_CODE = re.compile(
    r"""//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|\\\n""", re.DOTALL
)
_MACRO_HEADER = re.compile(
    r"^\s*(?:#|%:)[ \t]*(?:include(?:_next)?[ \t]+|.*\b__has_include(?:_next)?[ \t]*\([ \t]*)"
    r"[A-Za-z_]",
    re.MULTILINE,
)


def include_path(path: Path) -> list[Path]:
    """Return the folders of `#include <...>` for a .cu file, in the order they are searched."""
    return [INCLUDE, path.absolute().parent, *_package_folders()]


def source_of(path: Path) -> str:
    """Return the text of a .cu file, whatever bytes it holds."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def sources(path: Path) -> dict[str, str]:
    """Return the texts that decide a .cu file's machine code.

    A header counts in every folder where the compiler might find it: that of the file that
    includes it (in quotes) and those of `include_path`. So the order of the search need not be
    known, and a header that comes to lie before another is noticed.

    Returns:
        The file's own text by its name, then each header's by its absolute path.
    """
    folders = include_path(path)
    found = {path.name: source_of(path)}
    waiting = [(folders[1], found[path.name])]
    while waiting:
        folder, text = waiting.pop()
        for quoted, angled in _HEADER.findall(_joined(text)):
            for place in [folder, *folders] if quoted else folders:
                spelled = place / (quoted or angled)
                # its folder resolved, not itself: headers beside a link are looked for beside it
                file = Path(os.path.realpath(spelled.parent), spelled.name)
                if str(file) not in found and (content := _read(file)) is not None:
                    found[str(file)] = content
                    waiting.append((file.parent, content))
    return found


def own_sources(path: Path) -> dict[str, str]:
    """Return the texts of a .cu file and of the headers in reach that no package brings."""
    texts = sources(path)
    foreign = tuple(os.path.realpath(folder) for folder in (INCLUDE, *_package_folders()))
    own = {str(path): texts.pop(path.name)}
    return own | {file: text for file, text in texts.items() if not file.startswith(foreign)}


def has_macro_header(texts: dict[str, str]) -> bool:
    """Return whether a text includes a header by a macro, which only the compiler can follow."""
    return any(_MACRO_HEADER.search(NO_CODE.sub(" ", _joined(text))) for text in texts.values())


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape")
    except (OSError, ValueError):  # not there, a folder, or no name of a file at all
        return None


def _joined(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\\\n", "")


def _package_folders() -> list[Path]:
    library = libcudacxx()
    return [_cuda_headers(), *([library] if library else [])]


@lru_cache
def libcudacxx() -> Path | None:
    """Return the folder with cuda/std and cub, which cooperative groups need; None without."""
    package = find_spec("nvidia")
    for folder in (package and package.submodule_search_locations) or ():
        for pattern in ("*/include/cccl", "*/include"):
            for place in sorted(Path(folder).glob(pattern)):
                if (place / "cuda" / "std" / "cmath").is_file():
                    return place
    return None


@lru_cache
def _cuda_headers() -> Path:
    """Return the folder with cuda_fp16.h and cuda_bf16.h: Triton's wheel carries them all."""
    triton = find_spec("triton")  # not imported: a kept answer of `inspect` has no time for it
    folder = Path(triton.origin if triton and triton.origin else "").parent
    folder = folder / "backends" / "nvidia" / "include"
    if not (folder / "cuda_bf16.h").is_file():
        raise RuntimeError(
            "no CUDA headers in the installed triton; pip install 'triton>=3.6,<3.10'"
        )
    return folder

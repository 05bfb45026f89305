"""What the machine code of a .cu file is made of: own texts, and packages by their versions."""

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
    library = libcudacxx()
    return [INCLUDE, path.absolute().parent, _cuda_headers(), *([library] if library else [])]


def source_of(path: Path) -> str:
    """Return the text of a .cu file, whatever bytes it holds, without a byte order mark."""
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def sources(path: Path) -> dict[str, str]:
    """Return the texts that decide a .cu file's machine code, beside `package_versions`.

    A header counts in every folder of the user's or of nearlight where the compiler might find it:
    that of the file that includes it (in quotes), nearlight's and that of the .cu file. So the
    order of the search need not be known, and a header that comes to lie before another is
    noticed. Those of packages are not read, for CUB's alone take 1.6 s: what they include is
    taken to be a package's, too.

    Returns:
        The file's own text by its name, then each header's by its absolute path.
    """
    folders = [INCLUDE, path.absolute().parent]
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


def has_macro_header(texts: dict[str, str]) -> bool:
    """Return whether a text includes a header by a macro, which only the compiler can follow.

    The headers of CUB do, each of its own package, and `sources` holds none of these.
    """
    return any(_MACRO_HEADER.search(NO_CODE.sub(" ", _joined(text))) for text in texts.values())


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape")
    except (OSError, ValueError):  # not there, a folder, or no name of a file at all
        return None


def _joined(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\\\n", "")


@lru_cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages with CUDA's headers and NVRTC, by their names."""
    text = source_of(_triton() / "__init__.py")
    found = {"triton": "".join(re.findall(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE))}
    for folder in _nvidia():
        for part in ("cccl", "nvrtc"):  # also nvidia-cuda-cccl-cu12
            for place in folder.parent.glob(f"nvidia_cuda_{part}*.dist-info"):
                name, _, version = place.stem.partition("-")
                found[name.replace("_", "-")] = version
    return dict(sorted(found.items()))


@lru_cache
def libcudacxx() -> Path | None:
    """Return the folder with cuda/std and cub, which cooperative groups need; None without."""
    for folder in _nvidia():
        for pattern in ("*/include/cccl", "*/include"):
            for place in sorted(folder.glob(pattern)):
                if (place / "cuda" / "std" / "cmath").is_file():
                    return place
    return None


@lru_cache
def _cuda_headers() -> Path:
    """Return the folder with cuda_fp16.h and cuda_bf16.h: Triton's wheel carries them all."""
    folder = _triton() / "backends" / "nvidia" / "include"
    if not (folder / "cuda_bf16.h").is_file():
        raise RuntimeError(
            "no CUDA headers in the installed triton; pip install 'triton>=3.6,<3.10'"
        )
    return folder


def _triton() -> Path:
    found = find_spec("triton")  # not imported: a kept answer of `inspect` has no time for it
    return Path(found.origin if found and found.origin else "").parent


def _nvidia() -> list[Path]:
    found = find_spec("nvidia")
    return [Path(folder) for folder in (found and found.submodule_search_locations) or ()]

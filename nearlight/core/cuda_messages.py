"""What NVRTC and ptxas say: each message once, at the user's file and line, with what to do."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from nearlight.core.cuda_sources import libcudacxx
from nearlight.core.versions import install_line

# What stands around the messages, of cuda-core, NVRTC, ptxas and Triton.
_AROUND = re.compile(
    r"\s*|\d+: NVRTC_ERROR.*|\d+ (?:catastrophic )?errors? detected in the compilation.*|"
    r"Compilation terminated\.|ptxas info .*|ptxas +\. .*|ptxas fatal +: Ptx assembly aborted.*|"
    r"PTXAS error: .*|`ptxas` stderr:|Repro command: .*"
)
_PTX_LINE = re.compile(r"^ptxas (?:application ptx input|\S+\.ptx), line (\d+); (?=error|fatal)")
_OF_SYMBOL = re.compile(r"^ptxas (?=(?:error|fatal) .*'([\w$]+)')")
# What device code has without a header, by the headers of the host that bring it there.
_BUILT_IN = ("cstdio", "cassert", "cmath", "cstdlib", "cstring", "cstddef")
_NO_HEADERS = "NVRTC has no headers of the host's"
_INTEGER = re.compile(r'identifier "u?int(?:8|16|32|64)_t" is undefined')


def at_source_lines(text: str, path: Path, ptx: str) -> str:
    """Return a compiler's messages without what stands around them, and a hint where one helps.

    Args:
        text: what the compiler says; several of its parts may say the same.
        path: the source file, as its user names it.
        ptx: what ptxas assembled, "" where it did not come to that.
    """
    found = []
    for line in text.splitlines():
        if _AROUND.fullmatch(line):
            continue
        told = _PTX_LINE.sub(lambda m: _place(ptx, int(m[1])), line)
        told = _OF_SYMBOL.sub(lambda m: _place(ptx, _line_of_symbol(ptx, m[1])), told)
        if told != line:  # of ptxas: as NVRTC writes, and once where code was inlined twice
            told = re.sub(r"(?:error|fatal) +: ", "error: ", told, count=1)
            told = re.sub(r"'(_Z[\w$]+)'", lambda m: f"'{torch._C._demangle(m[1])}'", told)
            told = re.sub(r"\b0x[0-9a-f]+\b", lambda m: str(int(m[0], 16)), told)
        if told == line or told not in found:
            found.append(told)
    named = [re.sub(rf"^{re.escape(path.name)}(?=\()", str(path), each) for each in found]
    return "\n".join((*named, *filter(None, [_hint("\n".join(found))])))


def errors_in(text: str) -> list[str]:
    """Return the errors among a compiler's lines, each with the lines that go on with it."""
    block = r"^(.*\berror: .*(?:\n {10,}(?!\^| ).*(?=\n.*\n *\^))*)"
    return [" ".join(found.split()) for found in re.findall(block, text, re.MULTILINE)]


def _place(ptx: str, number: int) -> str:
    """Return "file(line): " of the source for a line of PTX, "" where nothing says it."""
    files = {
        key: name for key, *name in re.findall(r'\.file\s+(\d+) "([^"]*)"(?: "([^"]*)")?', ptx)
    }
    places = re.findall(r"\.loc\s+(\d+) (\d+)", "\n".join(ptx.splitlines()[:number]))
    if not places:
        return ""
    *_, name = filter(None, files[places[-1][0]])
    return f"{Path(name).name}({places[-1][1]}): "


def _line_of_symbol(ptx: str, symbol: str) -> int:
    """Return the line of PTX where a kernel begins, or where a function is called."""
    lines = ptx.splitlines()
    for number, line in enumerate(lines, 1):
        if re.search(rf"\.entry {re.escape(symbol)}\b", line):
            return next((n for n, t in enumerate(lines, 1) if n > number and ".loc" in t), 0)
        is_declared = line.lstrip().startswith((".", "(", "// .globl"))
        if not is_declared and re.search(rf"(?<!\w){re.escape(symbol)}\b", line):
            return number
    return 0


def _hint(text: str) -> str:
    """Return what to write instead of what only the host has, or ""."""
    missing = re.search(r'cannot open source file "([^"]+)"', text)
    name = missing[1] if missing else "stdint.h" if _INTEGER.search(text) else ""
    if not name:
        return ""
    standard = f"c{name.removesuffix('.h')}" if name.endswith(".h") else name
    library = libcudacxx()
    if standard in _BUILT_IN:
        return (
            f"{_NO_HEADERS}: leave {name} out; printf, assert, memcpy and the math functions "
            "(sqrtf, expf, fmaxf) need none, infinity and π are in <math_constants.h>"
        )
    if library is None and name.startswith(("cuda/", "cub/", "nv/", "thrust/")):
        return f"{name} comes with {install_line('cuda')}"
    has_std = library is not None and (library / "cuda" / "std" / standard).is_file()
    is_quoted = re.search(rf'include\s*"{re.escape(name)}"', text) is not None
    if "/" in name or "." in standard or (is_quoted and not has_std):
        return "headers are looked for beside the .cu file, below it and among CUDA's"
    if library is None:
        return f"{_NO_HEADERS}; <cuda/std/{standard}> comes with {install_line('cuda')}"
    if has_std:
        instead = f"write #include <cuda/std/{standard}>, whose names are in cuda::std"
        return f"{_NO_HEADERS}: {instead}"
    return f"{_NO_HEADERS}, and a kernel no <{name}>: pass pointers and sizes"

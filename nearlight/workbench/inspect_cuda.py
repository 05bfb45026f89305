"""The kernels of a .cu file as its compiler finds them, or how its templates are named."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

import torch

from nearlight.core import cuda
from nearlight.core.cuda_arguments import Template, templates
from nearlight.core.cuda_sources import sources
from nearlight.core.errors import BadInput


@dataclass(frozen=True)
class Compiled(cuda.Kernel):
    """A kernel that the compiler found in a file: macros, namespaces and `#if` hide none."""

    cubin: cuda.Cubin = field(kw_only=True)

    def compile(self, arch: str) -> cuda.Cubin:
        """Return what it was found in."""
        assert arch == self.cubin.arch, f"compiled for {self.cubin.arch}, asked for {arch}"
        return self.cubin


def compiled_kernels(path: Path, name: str, arch: str) -> list[Compiled]:
    """Compile a file for an arch once and return its kernels, or those that a name means.

    Args:
        path: the .cu file.
        name: "" for all, "copy", "b::copy", "copy<float, 4>" or all of a::b::copy<float>(float*).
        arch: "sm_90a", with the features of its own.

    Raises:
        BadInput: no such kernel; those that the file has are listed, templates with their line.
        CompileError: the file does not compile.
    """
    if "<" in name and "(" not in name:
        try:
            return [Compiled(path, name, cubin=cuda.compile_file(path, arch, name))]
        except cuda.CompileError as error:
            reason = re.search(r"__nv_name_map\(\d+\): error: (.*)", str(error))
            if reason is None:
                raise
        raise _no_kernel(path, name, arch, reason[1])
    found = _all_kernels(path, arch)
    chosen = [
        kernel
        for kernel, short, full in found
        if not name or name == full or is_called(short, name)
    ]
    if not chosen:
        raise _no_kernel(path, name, arch)
    return chosen


def _all_kernels(path: Path, arch: str) -> list[tuple[Compiled, str, str]]:
    """Return the kernels in the order of the source, each with its name in short and in full."""
    cubin = cuda.compile_file(path, arch)
    entries = re.findall(r"\.entry ([\w$]+)\(.*?\.loc\s+(\d+) (\d+)", cubin.ptx, re.DOTALL)
    entries.sort(key=lambda entry: (int(entry[1]), int(entry[2])))
    named = {symbol: _named(symbol) for symbol, *_ in entries}
    names = [short for short, _ in named.values()]
    found = []
    for symbol, (short, full) in named.items():
        label = short if names.count(short) == 1 else full
        found.append((Compiled(path, label, cubin=replace(cubin, symbol=symbol)), short, full))
    return found


def is_called(kernel: str, name: str) -> bool:
    """Return whether "copy", "b::copy" or all of it is said for a::b::copy<float>."""
    return name == kernel or f"::{kernel}".partition("<")[0].endswith(f"::{name}")


def _named(symbol: str) -> tuple[str, str]:
    """Return what C++ calls a mangled kernel, without its parameters and with them."""
    if not symbol.startswith("_Z"):
        return symbol, symbol
    full = torch._C._demangle(symbol).removeprefix("void ").replace("(anonymous namespace)::", "")
    match = re.fullmatch(r"(.+?)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", full)
    return (match[1] if match else full), full


def templates_of(path: Path) -> dict[str, Template]:
    """Return the templates of kernels that a file leaves to be named, by "copy<T> at file:line"."""
    own, *headers = sources(path).items()
    return {
        f"{template.name}<{template.parameters}> at {file}:{template.line}": template
        for file, text in ((str(path), own[1]), *headers)
        for template in templates(text)
    }


def _no_kernel(path: Path, name: str, arch: str, reason: str = "") -> BadInput:
    """Say what a file has instead of a kernel of this name, and what to type for one of them."""
    plain = name.partition("<")[0]
    named = templates_of(path)
    known = {kernel.name: kernel.name for kernel, *_ in _all_kernels(path, arch)}
    known |= {place: template.name for place, template in named.items()}
    if not known:
        is_there = any("__global__" in text for text in sources(path).values())
        what = "the compiler finds none; name a template with its arguments, 'FILE:NAME<float>'"
        return BadInput(
            f"{path} has no kernel: " + (what if is_there else "it defines no __global__ function")
        )
    meant = [place for place, own in known.items() if plain and is_called(own, plain)]
    near = get_close_matches(plain, known.values(), cutoff=0.4)
    alike = sorted(
        (p for p, own in known.items() if own in near), key=lambda p: near.index(known[p])
    )
    listed = meant or alike or list(known)
    template = named.get(listed[0])
    if not name:
        answer = f"{path} has kernels only as templates, compiled for arguments that you name"
    elif meant and template and not reason:
        answer = f"{path}:{name} is a template, compiled for arguments that you name"
    else:
        answer = f"{path} has no kernel {name!r}{f' ({reason})' if reason else ''}; it has"
    first = _example(path, template, arch) if template else known[listed[0]]
    advice = f"name one: nearlight inspect {shlex.quote(f'{path}:{first}')}"
    if template and (launcher := _launcher(path)):
        one = shlex.quote(f"{launcher}:{template.name}")
        advice += f"\nor as {launcher.name} launches it: nearlight inspect {one}"
    return BadInput("\n  ".join((f"{answer}:", *listed)) + f"\n{advice}")


def _example(path: Path, template: Template, arch: str) -> str:
    """Return a template's name with arguments that the compiler takes, or with dots."""
    values = []
    for parameter in template.parameters.split(","):
        if "=" in parameter or "..." in parameter:
            break  # the compiler knows the rest
        kind = parameter.split()[0]
        values.append({"typename": "float", "class": "float", "bool": "true"}.get(kind, "4"))
    name = f"{template.name}<{', '.join(values)}>"
    with suppress(cuda.CompileError):
        cuda.compile_file(path, arch, name)
        return name
    return f"{template.name}<...>"


def _launcher(path: Path) -> Path | None:
    """Return the op file beside a .cu file that launches its kernels, if there is one."""
    for file in sorted(path.parent.glob("*.py"), key=lambda file: file.stem != path.stem):
        text = file.read_text("utf-8", "replace")
        is_its = path.name in text or (file.stem == path.stem and ".cu" in text)
        if is_its and re.search(r"\bKernel\(", text) and re.search(r"\bOp\(", text):
            return file
    return None

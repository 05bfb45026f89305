"""What `inspect` is pointed at: an op, a .cu file or a bare Triton kernel, as builds per arch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction, type_canonicalisation_dict

from nearlight.core import cuda
from nearlight.core.errors import BadInput
from nearlight.core.op import KernelBuild, Op
from nearlight.core.user_code import split_name
from nearlight.workbench.load import load_file, load_op

_TYPE = re.compile(r"\*?(?:i1|[iu](?:8|16|32|64)|fp16|bf16|fp32|fp64|fp8e4nv|fp8e5)(?::(?:1|16))?")
_LAUNCH_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Target:
    """Kernels to look into.

    Attributes:
        name: what the user named.
        builds: `(arch) -> the kernels as they are compiled for it`.
        op: the record, where it is one.
    """

    name: str
    builds: Callable[[str], Sequence[KernelBuild]]
    op: Op | None = None


@dataclass(frozen=True)
class Options:
    """What the user adds to a kernel that has no Op record.

    Attributes:
        block: threads of a block of a .cu file's kernels; 0 where nothing is said.
        shared: bytes of dynamic shared memory of such a block.
        types: "x_ptr=*bf16,n=i64" for a Triton kernel's arguments.
        constants: "BLOCK=1024,num_warps=8", its compile-time constants and launch options.
    """

    block: int = 0
    shared: int = 0
    types: str = ""
    constants: str = ""

    def fitting(self, name: str, pair: Sequence[str]) -> Options:
        """Return what is meant for one of two targets of different kinds."""
        suffixes = {each: getattr(split_name(each)[0], "suffix", "") for each in pair}
        if len(set(suffixes.values())) == 1:
            return self
        is_cuda, is_python = suffixes[name] == ".cu", suffixes[name] == ".py"
        return Options(
            self.block if is_cuda else 0,
            self.shared if is_cuda else 0,
            self.types if is_python else "",
            self.constants if is_python else "",
        )


def find(name: str, options: Options) -> Target:
    """Return what a target names.

    Args:
        name: an op of ours, "file.py", "file.py:NAME" (an Op record or a kernel), "file.cu" or
            "file.cu:kernel<args>".
        options: refused where the target knows better.

    Raises:
        BadInput: nothing of that name, or options that are missing or too many.
    """
    path, kernel = split_name(name)
    suffix = getattr(path, "suffix", "")
    if suffix != ".cu" and (options.block or options.shared):
        raise BadInput(f"--block and --shared are for a .cu file; {name} says how it is launched")
    if suffix != ".py" and (options.types or options.constants):
        raise BadInput(
            f"--types and --constants are for a Triton kernel, file.py:kernel; not {name}"
        )
    if path is None:
        op = load_op(name)
        return Target(name, op.builds, op)
    if suffix == ".cu":
        return _cuda_target(name, path, kernel, options)
    return _python_target(name, path, kernel, options)


def _cuda_target(name: str, path: Path, kernel: str, options: Options) -> Target:
    if not path.is_file():
        raise BadInput(f"no file {path}")
    if not 0 <= options.block <= 1024:
        raise BadInput(f"--block {options.block}: a block has 1 to 1024 threads")
    if options.shared < 0:
        raise BadInput(f"--shared {options.shared}: bytes of shared memory are not below 0")

    def builds(arch: str) -> list[KernelBuild]:
        found = _compiled(path, kernel, arch)
        return [
            KernelBuild(each, {}, {}, num_threads=options.block, shared_bytes=options.shared)
            for each in found
        ]

    return Target(name, builds)


@dataclass(frozen=True)
class _Compiled(cuda.Kernel):
    """A kernel that the compiler found in a file: macros, namespaces and `#if` hide none."""

    cubin: cuda.Cubin = field(kw_only=True)

    def compile(self, arch: str) -> cuda.Cubin:
        assert arch == self.cubin.arch, f"compiled for {self.cubin.arch}, asked for {arch}"
        return self.cubin


def _compiled(path: Path, name: str, arch: str) -> list[_Compiled]:
    """Compile a file for an arch once and return its kernels, or those that a name means."""
    try:
        if "<" in name:
            return [_Compiled(path, name, cubin=cuda.compile_kernel(path, name, arch))]
        cubin = cuda.compile_file(path, arch)
    except cuda.CompileError as error:
        if "__nv_name_map" not in str(error):
            raise
        raise _no_kernel(path, name, re.findall(r"error: (.*)", str(error))[0]) from None
    entries = re.findall(r"\.entry ([\w$]+)\(.*?\.loc\s+(\d+) (\d+)", cubin.ptx, re.DOTALL)
    entries.sort(key=lambda entry: (int(entry[1]), int(entry[2])))  # as the source has them
    named = {symbol: _named(symbol) for symbol, *_ in entries}
    names = [short for short, _ in named.values()]
    found = []
    for symbol, (short, full) in named.items():
        if not name or name in (short, full) or _is_called(short, name):
            label = short if names.count(short) == 1 else full
            found.append(_Compiled(path, label, cubin=replace(cubin, symbol=symbol)))
    if not found:
        text = path.read_text("utf-8", "replace")
        if not re.search(r"__global__|\binclude\b", text):
            raise BadInput(f"{path} has no kernel: it defines no __global__ function")
        raise _no_kernel(path, name, known=names)
    return found


def _is_called(kernel: str, name: str) -> bool:
    """Return whether "copy" or "b::copy" is said for a::b::copy<float>."""
    return f"::{kernel}".partition("<")[0].endswith(f"::{name}")


def _named(symbol: str) -> tuple[str, str]:
    """Return what C++ calls a mangled kernel, without its parameters and with them."""
    if not symbol.startswith("_Z"):
        return symbol, symbol
    full = torch._C._demangle(symbol).removeprefix("void ").replace("(anonymous namespace)::", "")
    match = re.fullmatch(r"(.+?)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", full)
    return (match[1] if match else full), full


def _no_kernel(path: Path, name: str, reason: str = "", known: Sequence[str] = ()) -> BadInput:
    offered = ", ".join(get_close_matches(name, known, cutoff=0.4) or known) or "none"
    what = (f"no kernel {name!r}" if name else "no kernel") + (f" ({reason})" if reason else "")
    return BadInput(
        f"{path} has {what}; name one as '{path}:NAME', a template as "
        f"'{path}:{name.partition('<')[0] or 'NAME'}<...>'; the compiler finds: {offered}"
    )


def _python_target(name: str, path: Path, attribute: str, options: Options) -> Target:
    module = load_file(path)
    members = vars(module)
    found = members.get(attribute or "OP")
    if isinstance(found, Op):
        if options.types or options.constants:
            raise BadInput(f"{name} is an Op record, whose builds say types and constants")
        return Target(name, found.builds, found)
    if isinstance(found, cuda.Kernel):
        build = KernelBuild(found, {}, {})
        return Target(name, lambda arch: [build])
    kernel = _unwrapped(found)
    if kernel is None:
        known = [each for each, value in members.items() if isinstance(value, Op | cuda.Kernel)]
        known += [each for each, value in members.items() if _unwrapped(value) is not None]
        offered = ", ".join(get_close_matches(attribute, known, cutoff=0.4) or known)
        hint = f"name one of {offered}" if offered else "define OP = Op(...) or a @jit kernel"
        what = f"kernel or Op record called {attribute}" if attribute else "Op record called OP"
        raise BadInput(f"{path} has no {what}; {hint}: {path}:NAME")
    build = triton_build(kernel, name, options.types, options.constants)
    return Target(name, lambda arch: [build])


def _unwrapped(value: Any) -> JITFunction[Any] | None:
    """Return the kernel inside `triton.autotune` and `triton.heuristics`, None for other things."""
    while not isinstance(value, JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, JITFunction) else None


def triton_build(
    kernel: JITFunction[Any], name: str, types: str = "", constants: str = ""
) -> KernelBuild:
    """Return the build of a bare Triton kernel, typed by its annotations and the user.

    Args:
        kernel: made by `triton.jit` or `nearlight.core.triton.jit`.
        name: of the target, for the message.
        types: "x_ptr=*bf16,n=i64"; an annotation (`x_ptr: "*bf16"`) says the same.
        constants: "BLOCK=1024"; also num_warps and num_stages.

    Raises:
        BadInput: an argument that is missing, unknown or of no known type; the message holds the
            options to paste.
    """
    parameters = {p.name: p for p in kernel.params}
    signature = {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
    signature |= _pairs("--types", types, parameters)
    for argument, kind in signature.items():
        if not _TYPE.fullmatch(kind):
            near = type_canonicalisation_dict.get(kind.strip("*").removeprefix("torch."), "")
            raise BadInput(
                f"--types {argument}={kind}: allowed are i1, i8 to i64, u8 to u64, fp16, bf16, "
                "fp32, fp64 and fp8e4nv, fp8e5; * before it for a pointer, :16 behind it for a "
                "multiple of 16" + (f"; did you mean {near.replace('u1', 'i1')}?" if near else "")
            )
    given = _pairs("--constants", constants, (*parameters, *_LAUNCH_OPTIONS))
    values = {argument: _value(argument, text) for argument, text in given.items()}
    launch = {each: values.pop(each) for each in _LAUNCH_OPTIONS if each in set(values)}
    signature = {each: kind for each, kind in signature.items() if each not in values}
    known = {*signature, *values}
    missing = [p for p in kernel.params if p.name not in known and not p.has_default]
    if missing:
        needs_type = [p for p in missing if not p.is_constexpr]
        lines = {
            "--types": ",".join(f"{p.name}={_guess(p.name, kernel.src)}" for p in needs_type),
            "--constants": ",".join(f"{p.name}=128" for p in missing if p.is_constexpr),
        }
        pasted = " ".join(f"{option} '{text}'" for option, text in lines.items() if text)
        raise BadInput(
            f"{name} takes {', '.join(parameters)}; nothing says what "
            f"{', '.join(p.name for p in missing)} "
            f"{'are' if len(missing) > 1 else 'is'}. Correct and add: {pasted}"
        )
    return KernelBuild(kernel, signature, values, **launch)


def _pairs(option: str, text: str, allowed: Iterable[str]) -> Mapping[str, str]:
    pairs = {}
    names = list(allowed)
    for part in filter(None, text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals or not value:
            near = get_close_matches(name, names, 1)
            hint = f", did you mean {near[0]}?" if near else ";"
            raise BadInput(f"{option} {part!r}: written NAME=VALUE{hint} names: {', '.join(names)}")
        pairs[name] = value
    return pairs


def _value(name: str, text: str) -> Any:
    """Return a number, True, None, "text" or a type of Triton ("tl.float32")."""
    if text.startswith("tl.") and isinstance(dtype := getattr(tl, text[3:], None), tl.dtype):
        return dtype
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise BadInput(
            f"--constants {name}={text}: allowed are numbers, True, False, None, quoted text and "
            "tl.float32 and the like"
        ) from None


def _guess(name: str, source: str) -> str:
    """Return a type: a pointer's where an address, or what it is added to, begins with the name."""
    begun = "|".join([name, *re.findall(rf"\b(\w+) = \(*{name} \+", source)])
    if re.search(rf"\btl\.(?:load|store|atomic_\w+|make_\w+)\(\s*\(*(?:{begun})\b", source):
        return "*bf16"
    return "*bf16" if "ptr" in name.lower() else "i64" if "stride" in name.lower() else "i32"

"""Launch arguments of CUDA C++ kernels, typed by the kernel's own declaration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nearlight.core.cuda_sources import NO_CODE

_TEMPLATE = re.compile(
    r"\btemplate\s*<((?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*)>(?:\s|extern|static|inline)*$"
)
_KERNEL = re.compile(
    r"__global__[^;{}(]*?(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)[^;{}(]*?)?(\w+)\s*\("
)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*", re.MULTILINE)
_QUALIFIER = re.compile(
    r"\b(const|volatile|__restrict__|__restrict|restrict|__grid_constant__)\b|\[\[[^\]]*\]\]"
)

# C++ scalar types of kernel parameters by their numpy type; a number is converted to it.
SCALARS: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "char": np.int8,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned int": np.uint32,
    "long": np.int64,
    "long long": np.int64,
    "unsigned long": np.uint64,
    "unsigned long long": np.uint64,
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "int16_t": np.int16,
    "uint16_t": np.uint16,
    "int32_t": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
    "uint64_t": np.uint64,
    "size_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
}

POINTEES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "__half": torch.float16,
    "half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "short": torch.int16,
    "int16_t": torch.int16,
    "int": torch.int32,
    "int32_t": torch.int32,
    "long": torch.int64,
    "long long": torch.int64,
    "int64_t": torch.int64,
    "unsigned char": torch.uint8,
    "uint8_t": torch.uint8,
    "signed char": torch.int8,
    "int8_t": torch.int8,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel as its source declares it; `type` is a pointer's pointee."""

    name: str
    type: str
    is_pointer: bool


@dataclass(frozen=True)
class Template:
    """A template of a kernel: "outer::copy", its "typename T, int N", and the line of the name."""

    name: str
    parameters: str
    line: int


def _code(source: str) -> str:
    """Return the source without what is no code, its lines where they were."""
    return NO_CODE.sub(lambda found: " " + "\n" * found[0].count("\n"), source)


def _heads(text: str, name: str) -> Iterator[re.Match[str]]:
    """Yield where a kernel is declared or defined, up to its parameters."""
    return re.finditer(rf"__global__[^;{{}}]*?\b{re.escape(_plain(name))}\s*\(", text)


def _plain(name: str) -> str:
    return name.split("<")[0].split("::")[-1].strip()


def line_of(source: str, name: str) -> int:
    """Return the line of a kernel's last declaration; 0 where the source has no such kernel."""
    text = _code(source)
    return max((text.count("\n", 0, head.end()) + 1 for head in _heads(text, name)), default=0)


def templates(source: str) -> list[Template]:
    """Return the templates of kernels that the source leaves to be named, in their order."""
    text = _code(_MACRO.sub(lambda macro: "\n" * macro[0].count("\n"), source))
    found: dict[str, Template] = {}
    for match in _KERNEL.finditer(text):
        before, line = text[: match.start()], text.count("\n", 0, match.end()) + 1
        header = _TEMPLATE.search(before)
        is_instantiated = re.search(rf"\btemplate\s+(?!\s|<)[^;{{]*\b{match[1]}\s*<", text)
        if header and header[1].strip() and not is_instantiated:
            name = "::".join((*_namespaces(before), match[1]))
            found.setdefault(name, Template(name, " ".join(header[1].split()), line))
    return list(found.values())


def _namespaces(before: str) -> list[str]:
    """Return the named namespaces that are open at the end of a text."""
    scopes: list[str] = []
    for match in re.finditer(r"\bnamespace\s*([\w:]*)\s*\{|[{}]", before):
        if match[0] == "}":
            del scopes[-1:]
        else:
            scopes.append(match[1] or "")
    return list(filter(None, scopes))


def parameters(source: str, name: str) -> tuple[Parameter, ...]:
    """Return the parameters of kernel `name` in CUDA C++ source.

    Template parameters that the name gives ("copy<float, 4>") are put in.

    Raises:
        ValueError: there is no such kernel (those that exist are named), or several definitions
            of it, in branches of `#if` or as overloads, take different types.
    """
    text, plain = _code(source), _plain(name)
    defined: list[tuple[list[str], dict[str, str]]] = []
    declared: list[tuple[list[str], dict[str, str]]] = []
    for match in _heads(text, name):
        parts, end = _split(text[match.end() :])
        given = _template_arguments(text[: match.start()], name)
        is_definition = text[match.end() + end :].lstrip().startswith("{")
        (defined if is_definition else declared).append((parts, given))
    if not defined and not declared:
        known = _KERNEL.findall(text)
        raise ValueError(
            f"no kernel {plain!r} in the source; it has {', '.join(sorted(set(known))) or 'none'}"
        )
    found = [tuple(_parameter(part, g) for part in parts) for parts, g in defined or declared]
    kinds = {tuple((p.type, p.is_pointer) for p in each): each for each in found}
    if len(kinds) > 1:
        lists = " and ".join(f"({_written(each)})" for each in kinds.values())
        raise ValueError(
            f"kernel {plain!r} has several definitions, which take {lists}; which one is compiled "
            "cannot be read from the source: give each a name of its own"
        )
    return found[0]


def _split(text: str) -> tuple[list[str], int]:
    """Split a list at its commas up to its closing parenthesis; return where it ends, too."""
    depth, parts, start = 0, [], 0
    for index, character in enumerate(text):
        if character == ")" and depth == 0:
            break
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    else:
        index = len(text)
    parts.append(text[start:index])
    return [part for part in parts if part.strip()], index + 1


def _template_arguments(before: str, name: str) -> dict[str, str]:
    """Return the arguments in a kernel's name by the template parameters declared before it."""
    header = _TEMPLATE.search(before)
    if header is None or "..." in header[1]:
        return {}
    names = [part.split("=")[0].split()[-1] for part in header[1].split(",") if part.strip()]
    values, _ = _split(name.partition("<")[2].rpartition(">")[0])
    return dict(zip(names, map(str.strip, values), strict=False))


def _parameter(text: str, given: dict[str, str]) -> Parameter:
    text = re.sub(r"\b[A-Za-z_]\w*", lambda word: given.get(word[0], word[0]), text)
    text = _QUALIFIER.sub(" ", text)
    text = text.split("=")[0]  # without a default value
    outside = re.sub(r"<.*>", "", text, flags=re.DOTALL)  # Pair<int*, float> is no pointer
    levels = outside.count("*") + ("[" in outside)
    words = re.sub(r"\[[^\]]*\]|[*&](?![^<]*>)", " ", text).split()
    if len(words) < 2 or "#" in text or not words[-1].isidentifier():
        raise ValueError(f"cannot read the kernel parameter {text.strip()!r}")
    base = " ".join(words[:-1]).removeprefix("std::")
    return Parameter(words[-1], base + "*" * (levels - 1), levels > 0)


def _written(declared: Sequence[Parameter]) -> str:
    return ", ".join(f"{p.type}{'*' if p.is_pointer else ''} {p.name}" for p in declared)


def _known_type(written: str) -> str:
    """Return the one spelling that the tables hold of C++'s many for an integer type."""
    words = written.split()
    if not set(words) <= {"signed", "unsigned", "short", "long", "int"}:
        return written
    sign = ["unsigned"] if "unsigned" in words else []
    return " ".join(sign + ([w for w in words if w in ("short", "long")] or ["int"]))


def typed_arguments(
    name: str, declared: Sequence[Parameter], args: Sequence[Any], device: torch.device
) -> list[Any]:
    """Convert launch arguments to the types the kernel declares.

    Tensors may be on the meta device: then nothing but the kinds is looked at.

    Raises:
        TypeError: wrong count, or an argument that is not what the parameter takes.
        ValueError: a number that the parameter's type cannot hold, or a tensor elsewhere.
    """
    if len(args) != len(declared):
        wants = f"{len(declared)} arguments ({_written(declared)})"
        given = ", ".join(map(_kind, args))
        raise TypeError(f"{name} takes {wants}; got {len(args)} ({given})")
    try:
        return [
            _pointer(name, parameter, value, device)
            if parameter.is_pointer
            else _scalar(name, parameter, value)
            for parameter, value in zip(declared, args, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}; it takes ({_written(declared)})") from None


def _pointer(name: str, parameter: Parameter, value: Any, device: torch.device) -> int:
    if value is None:
        return 0
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name}: {parameter.name} is a pointer and takes a tensor or None; got {_kind(value)}"
        )
    if value.device != device:
        raise ValueError(f"{name}: {parameter.name} is on {value.device}, the launch on {device}")
    is_address = parameter.type.endswith("*")  # a pointer to pointers takes them as numbers
    expected = torch.int64 if is_address else POINTEES.get(_known_type(parameter.type))
    if expected is not None and value.dtype != expected:
        raise TypeError(
            f"{name}: {parameter.name} points to {parameter.type} and takes {expected}; "
            f"got {value.dtype}"
        )
    return value.data_ptr()


def _scalar(name: str, parameter: Parameter, value: Any) -> Any:
    what = f"{name}: {parameter.name}"
    kind = SCALARS.get(_known_type(parameter.type))
    if kind is None:
        if isinstance(value, np.generic):
            return value
        raise TypeError(
            f"{what} has the type {parameter.type}, whose size is not known here; pass a numpy "
            "scalar of exactly its size (np.float32: 4 bytes, np.int64: 8 bytes), "
            f"not {type(value).__name__}"
        )
    number = _number(value)
    if number is None:
        given = _kind(value) if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(f"{what} is {parameter.type} and takes a number; got {given}")
    if issubclass(kind, np.floating):
        return _float(what, parameter.type, kind, number)
    if isinstance(number, float):  # also a whole one: for another shape it would not be
        raise TypeError(f"{what} is {parameter.type} and takes an integer; got {value!r}")
    low, high = (0, 1) if kind is np.bool_ else _limits(kind)
    if not low <= number <= high:
        raise ValueError(f"{what}={value} does not fit {parameter.type}")
    return kind(number)


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"a tensor of {value.dtype}" if is_tensor else type(value).__name__


def _number(value: Any) -> int | float | None:
    """Return a number, a numpy scalar or a one-element tensor as a Python number, else None."""
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        value = (torch.ones((), dtype=value.dtype) if value.is_meta else value).item()
    return value if isinstance(value, int | float) else None


def _float(what: str, written: str, kind: type[np.floating[Any]], number: int | float) -> Any:
    try:
        with np.errstate(over="ignore"):
            converted = kind(number)
    except OverflowError:  # an int beyond every float
        converted = kind(np.inf)
    if np.isinf(converted) and number not in (float("inf"), float("-inf")):
        raise ValueError(f"{what}={number} does not fit {written}")
    return converted


def _limits(kind: type[np.generic]) -> tuple[int, int]:
    limits = np.iinfo(kind)  # type: ignore[type-var]  # kind is an integer type here
    return int(limits.min), int(limits.max)

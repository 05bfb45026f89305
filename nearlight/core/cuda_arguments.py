"""Launch arguments of CUDA C++ kernels, typed by the kernel's own declaration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

# C++ scalar types of kernel parameters by their numpy type; a Python number is converted to it.
SCALARS: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "char": np.int8,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned": np.uint32,
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
    "int": torch.int32,
    "int32_t": torch.int32,
    "long long": torch.int64,
    "int64_t": torch.int64,
    "unsigned char": torch.uint8,
    "uint8_t": torch.uint8,
    "int8_t": torch.int8,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel as its source declares it."""

    name: str
    type: str
    is_pointer: bool


def parameters(source: str, name: str) -> tuple[Parameter, ...]:
    """Return the parameters of kernel `name` in CUDA C++ source.

    Raises:
        ValueError: there is no such kernel; those that exist are named.
    """
    text = _COMMENT.sub(" ", source)
    plain = name.split("<")[0].split("::")[-1]
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(plain)}\s*\(", text)
    if found is None:
        known = re.findall(
            r"__global__[^;{}(]*?(?:__launch_bounds__\([^)]*\)[^;{}(]*?)?(\w+)\s*\(", text
        )
        raise ValueError(
            f"no kernel {plain!r} in the source; it has {', '.join(sorted(set(known))) or 'none'}"
        )
    inside, depth, parts, current = text[found.end() :], 0, [], ""
    for character in inside:
        if character == ")" and depth == 0:
            break
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    return tuple(_parameter(part) for part in parts if part.strip())


def _parameter(text: str) -> Parameter:
    text = re.sub(r"\b(const|volatile|__restrict__|__grid_constant__|restrict)\b", " ", text)
    is_pointer = "*" in text or "[" in text
    words = re.sub(r"\[[^\]]*\]|[*&]", " ", text).split()
    if len(words) < 2:
        raise ValueError(f"cannot read the kernel parameter {text.strip()!r}")
    base = " ".join(words[:-1])
    return Parameter(words[-1], base.removeprefix("std::"), is_pointer)


def typed_arguments(
    name: str, declared: Sequence[Parameter], args: Sequence[Any], device: torch.device
) -> list[Any]:
    """Convert launch arguments to the types the kernel declares.

    Raises:
        TypeError: wrong count, or an argument that is not what the parameter takes.
        ValueError: a number that the parameter's type cannot hold, or a tensor elsewhere.
    """
    if len(args) != len(declared):
        wants = ", ".join(f"{p.type}{'*' if p.is_pointer else ''} {p.name}" for p in declared)
        raise TypeError(f"{name} takes {len(declared)} arguments ({wants}); got {len(args)}")
    return [
        _pointer(name, parameter, value, device)
        if parameter.is_pointer
        else _scalar(name, parameter, value)
        for parameter, value in zip(declared, args, strict=True)
    ]


def _pointer(name: str, parameter: Parameter, value: Any, device: torch.device) -> int:
    if value is None:
        return 0
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name}: {parameter.name} is a pointer and takes a tensor or None; "
            f"got {type(value).__name__}"
        )
    if value.device != device:
        raise ValueError(f"{name}: {parameter.name} is on {value.device}, the launch on {device}")
    expected = POINTEES.get(parameter.type)
    if expected is not None and value.dtype != expected:
        raise TypeError(
            f"{name}: {parameter.name} points to {parameter.type} and takes {expected}; "
            f"got {value.dtype}"
        )
    return value.data_ptr()


def _scalar(name: str, parameter: Parameter, value: Any) -> Any:
    if isinstance(value, np.generic):
        return value
    kind = SCALARS.get(parameter.type)
    if kind is None:
        raise TypeError(
            f"{name}: {parameter.name} has the type {parameter.type}, which a Python number does "
            "not fix; pass a numpy scalar of the right size"
        )
    if issubclass(kind, np.floating):
        return kind(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{name}: {parameter.name} is {parameter.type}; got {value!r}")
    if kind is not np.bool_:
        limits = np.iinfo(kind)  # type: ignore[type-var]  # kind is an integer type here
        if not limits.min <= int(value) <= limits.max:
            raise ValueError(f"{name}: {parameter.name}={value} does not fit {parameter.type}")
    return kind(value)

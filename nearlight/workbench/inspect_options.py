"""Options of `inspect`: how a kernel is launched, where no Op record says it.

A Triton kernel is compiled for the types of its arguments and the values of its constants, which
`--types` and `--constants` say. Where something lacks, the error holds a guess to be corrected.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from typing import Any

import triton.language as tl
from triton.errors import TritonError
from triton.runtime.jit import JITFunction, KernelParam, type_canonicalisation_dict

from nearlight.core import triton
from nearlight.core.errors import BadInput
from nearlight.core.launch import describe, described_launches
from nearlight.core.op import KernelBuild
from nearlight.core.user_code import split_name

_KIND = r"(?:i1|[iu](?:8|16|32|64)|fp16|bf16|fp32|fp64|fp8e4nv|fp8e4b15|fp8e5)"
_TYPE = re.compile(rf"\*?{_KIND}(?::(?:1|16))?|tensordesc<{_KIND}\[[\d, ]+\]>")
# The tensor of a stride, where the next may be of the same: "x_stride_row", "stride_am".
_STRIDE = re.compile(r"(.+_stride_|stride_[a-z](?=.$)).+")
_NUMBER = re.compile(r"-?[\d.].*|True|False|None")
_DTYPES = {
    name: "i1" if kind == "u1" else kind for name, kind in type_canonicalisation_dict.items()
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Options:
    """What the user says of a kernel where no Op record does, or instead of it.

    Attributes:
        block: threads of a block of a .cu file's kernels; 0 where nothing is said.
        shared: bytes of dynamic shared memory of such a block.
        types: "x_ptr=*bf16,n=i64" for a Triton kernel's arguments; "n=4096" is typed as a launch
            with this number is.
        constants: "BLOCK=1024,ACC=fp32,num_warps=8", its compile-time constants and launch options.
    """

    block: int = 0
    shared: int = 0
    types: str = ""
    constants: str = ""

    @property
    def pasted(self) -> str:
        """The options as a shell reads them, each with a space before it."""
        given = ((f"--{name}", value) for name, value in vars(self).items() if value)
        return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given)

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


def triton_build(
    start: KernelBuild, name: str, types: str = "", constants: str = ""
) -> KernelBuild:
    """Return the build of a Triton kernel with what its annotations and the user add.

    Args:
        start: what a record says; of a bare kernel nothing.
        name: of the target, for the message.
        types: "x_ptr=*bf16,n=i64"; an annotation (`x_ptr: "*bf16"`) says the same. "n=4096" is
            what a launch makes of the number, "i32:16", and "stride=1" a constant.
        constants: "BLOCK=1024"; also num_warps, num_stages and enable_fp_fusion.

    Raises:
        BadInput: an argument that is missing, unknown or of no known type; the message holds
            options to paste, if there are any that compile.
    """
    kernel = start.kernel
    parameters = [p.name for p in kernel.params]
    given = _pairs("--types", types, parameters)
    pairs = _pairs("--constants", constants, (*parameters, *_LAUNCH_OPTIONS))
    values = {argument: _value(argument, text, kernel) for argument, text in pairs.items()}
    # before anything is guessed: what the launch cannot be, no guess mends
    start = replace(start, **{each: values.pop(each) for each in _LAUNCH_OPTIONS if each in pairs})
    numbers = {n: _value(n, text, kernel) for n, text in given.items() if _NUMBER.fullmatch(text)}
    with described_launches(None) as launched:
        describe(kernel, (), numbers)
    signature = {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
    fixed: dict[str, Any] = {}
    for kinds, known in (
        (start.signature, start.constants),
        ({each: kind for each, kind in given.items() if each not in numbers}, {}),
        (launched[0].signature, launched[0].constants),
        ({}, values),
    ):  # what is said later holds
        signature = {n: kind for n, kind in (signature | {**kinds}).items() if n not in known}
        fixed = {n: value for n, value in (fixed | {**known}).items() if n not in kinds}
    for argument, kind in signature.items():
        if not _TYPE.fullmatch(kind):
            near = _DTYPES.get(kind.strip("*").removeprefix("torch."), "")
            raise BadInput(
                f"--types {argument}={kind}: allowed are i1, i8 to i64, u8 to u64, fp16, bf16, "
                "fp32, fp64, fp8e4nv, fp8e4b15 and fp8e5; * before it for a pointer, :16 behind it "
                "for a multiple of 16; tensordesc<fp16[64, 64]>; the number that a launch gives"
                + (f"; did you mean {near}?" if near else "")
            )
    missing = [p for p in kernel.params if p.name not in {*signature, *fixed} and not p.has_default]
    if missing:
        raise BadInput(
            f"{name} takes {', '.join(parameters)}; nothing says what "
            f"{', '.join(p.name for p in missing)} {'are' if missing[1:] else 'is'}. "
            + _advice(start, missing, types, constants)
        )
    return replace(start, signature=signature, constants=fixed)


def _advice(start: KernelBuild, missing: Sequence[KernelParam], types: str, constants: str) -> str:
    """Return options to paste that say all that is missing, if the compiler takes them."""
    kernel = start.kernel
    constant = [p.name for p in missing if p.is_constexpr]
    typed = [p.name for p in missing if p.name not in constant]
    for size in ("64", "16"):
        guesses = (
            [types, *(f"{each}={_guess(each, kernel)}" for each in typed)],
            [
                constants,
                *(f"{each}={_guess_constant(each, kernel.src, size)}" for each in constant),
            ],
        )
        texts = [",".join(filter(None, parts)) for parts in guesses]
        with suppress(TritonError, ValueError, TypeError, RuntimeError):
            triton.compile_for(triton_build(start, "", *texts), "sm_80", is_strict=False)
            return f"Correct and give:{Options(0, 0, *texts).pasted}"
    said = {"--types NAME=*bf16 or NAME=i32": typed, "--constants NAME=VALUE": constant}
    return "Give " + ", ".join(f"{o} for {', '.join(each)}" for o, each in said.items() if each)


def _pairs(option: str, text: str, names: Sequence[str]) -> Mapping[str, str]:
    pairs = {}
    for part in filter(None, re.split(r",(?![^(\[]*[)\]])", text)):  # a tuple's comma is its own
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals or not value:
            near = get_close_matches(name, names, 1)
            hint = f", did you mean {near[0]}?" if near else ";"
            raise BadInput(f"{option} {part!r}: written NAME=VALUE{hint} names: {', '.join(names)}")
        pairs[name] = value
    return pairs


def _value(name: str, text: str, kernel: JITFunction[Any]) -> Any:
    """Return a literal, a type ("fp32", "tl.float32") or what the kernel's file calls so."""
    with suppress(SyntaxError, ValueError):
        return ast.literal_eval(text)
    if kind := _DTYPES.get(text.removeprefix("tl.").removeprefix("torch.")):
        return tl.dtype(re.sub(r"^(u?)i?(?=\d)", r"\1int", kind))
    with suppress(AttributeError, KeyError):
        first, *rest = text.split(".")
        found = reduce(getattr, rest, kernel.fn.__globals__[first])
        return found.value if isinstance(found, tl.constexpr) else found
    raise BadInput(
        f"{name}={text}: allowed are numbers, True, False, None, quoted text, a type (fp32) and "
        "what the kernel's file gives a name"
    )


def _guess(name: str, kernel: JITFunction[Any]) -> str:
    """Return a type: a pointer's where an address, or what it is added to, begins with the name.

    The last of the strides of a tensor is taken for 1, an epsilon for a float.
    """
    begun = "|".join([name, *re.findall(rf"\b(\w+) = \(*{name} \+", kernel.src)])
    pattern = rf"\btl\.(?:load|store|atomic_\w+|make_\w+)\(\s*\(*(?:{begun})\b"
    if re.search(pattern, kernel.src) or "ptr" in name.lower():
        return "*bf16"
    if re.search("eps|scale|alpha", name):
        return "fp32"
    index = kernel.arg_names.index(name)
    around = ["", *kernel.arg_names, ""][index : index + 3]
    before, own, after = ((m := _STRIDE.fullmatch(each)) and m[1] for each in around)
    return "1" if own and before == own != after else "i32"


def _guess_constant(name: str, source: str, size: str) -> str:
    """Return what a source makes of a constant: a text, a type, a condition, or else a size."""
    if match := re.search(rf"\b{name} (?:==|!=|in) [(\[]?['\"](.*?)['\"]", source):
        return json.dumps(match[1])
    if f"input_precision={name}" in source:
        return '"ieee"'
    if re.search(rf"\.to\({name}\b|\bdtype={name}\b|\.(?:zeros|full)\(.*[)\]],.* {name}\)", source):
        return "fp32"
    is_condition = re.search(rf"\b(?:if|not|and|or) {name}\b(?! *[-<>=!+*/%.])", source)
    return "True" if is_condition else size

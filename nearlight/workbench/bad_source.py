"""Source that runs on no input: what does not compile, launches that do not fit, bad records.

It is the user's bad input and no broken property; the message holds the compiler's own lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import dedent, indent
from typing import Any

import torch
from triton import language
from triton.compiler.errors import CompilationError
from triton.language.extra import libdevice
from triton.runtime.jit import JITFunction

from nearlight.core import cuda, triton
from nearlight.core.builds import compile_build
from nearlight.core.errors import BadInput, one_line
from nearlight.core.launch import describe, described_launches
from nearlight.core.machine_code import ARCHES
from nearlight.core.op import KernelBuild, Op
from nearlight.core.user_code import place_of

COMPILE_ERRORS = (cuda.CompileError, CompilationError)


class BadSource(BadInput):
    """No input can run this source; raised through whatever takes errors for findings."""


def at_users_line(kernel: Any, error: CompilationError) -> str:
    """Return Triton's message once, behind file and line, with that line and a caret below it.

    Of functions that call each other it is the innermost one that its caller knows by a name.
    """
    kernel = _python_kernel(kernel)
    node, inner = error.node, error
    while (cause := inner.__cause__) is not None:
        functions = (f for f in kernel.fn.__globals__.values() if isinstance(f, JITFunction))
        called = next((f for f in functions if f.src == getattr(cause, "src", "")), None)
        if called is not None:
            kernel, node = called, cause.node
        inner = cause
    message = getattr(inner, "error_message", None) or one_line(inner)
    number = getattr(node, "lineno", 1)  # from `def`; its columns are counted in bytes
    text = kernel.src.splitlines()[number - 1]
    before = text.encode()[: getattr(node, "col_offset", 0)].decode()
    shown = indent(dedent(f"{text}\n{' ' * len(before)}^"), "  ")
    return f"{_place(kernel, number)}: {message}{_elsewhere(message)}\n{shown}"


def _elsewhere(message: str) -> str:
    """Say in which other module of Triton a function is that the kernel looked for."""
    missing = re.search(r"module '(triton\.[\w.]+)' has no attribute '(\w+)'", message)
    if missing is None:
        return ""
    looked_in, name = missing.groups()
    for module in (language, language.math, libdevice):
        if module.__name__ != looked_in and callable(getattr(module, name, None)):
            return f"; {name} is in {module.__name__}"
    return ""


def place_of_kernel(kernel: Any) -> str:
    """Return file and line of a kernel's definition."""
    return kernel.place if isinstance(kernel, cuda.Kernel) else _place(_python_kernel(kernel), 1)


def _python_kernel(kernel: Any) -> Any:
    """Return Triton's kernel inside what a tuner of Triton's own wraps around it."""
    while not hasattr(kernel, "raw_src"):
        kernel = kernel.fn
    return kernel


def _place(kernel: Any, number: int) -> str:
    """Return file and line of a line of a Triton kernel, counted from `def`."""
    decorators = next(
        n for n, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def ")
    )
    line = kernel.starting_line_number + decorators + number - 1
    return f"{kernel.fn.__code__.co_filename}:{line}"


def builds_of(op: Op, arch: str) -> Sequence[KernelBuild]:
    """Return the builds that an op's record names for an arch; BadSource where they are none."""
    builds = op.builds(arch)
    if not isinstance(builds, Sequence) or any(not isinstance(b, KernelBuild) for b in builds):
        given = repr(builds)[:80]
        raise BadSource(
            f"{op.name}: builds({arch!r}) returned {given}, allowed is a sequence of KernelBuild"
        )
    return builds


def refuse_launch(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> None:
    """Raise BadSource if a launch that raised would do so whatever its tensors hold.

    It is compiled for the GPU that it was meant for; a launch on the CPU for every arch.
    """
    tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_cuda)
    gpus = [torch.cuda.get_device_capability(tensor.device) for tensor in tensors][:1]
    archs = [f"sm_{major}{minor}" for major, minor in gpus] or ARCHES
    try:
        if isinstance(kernel, cuda.Kernel):
            _refuse(lambda arch: [KernelBuild(kernel, {}, {})], archs, place_of(error))
            raise error
        options = triton.launch_options()
        kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in options})
        with described_launches(None) as builds:
            describe(kernel, args, kwargs)
        _refuse(lambda arch: builds, archs)
    except BadSource as found:
        raise found from error
    except Exception as found:
        if isinstance(found, TypeError) and isinstance(error, TypeError):
            raise BadSource(_misfit(kernel, error)) from found


def refuse_builds(op: Op) -> None:
    """Raise BadSource where the builds of an op compile for no arch."""
    _refuse(partial(builds_of, op), ARCHES)


def _refuse(
    builds: Callable[[str], Sequence[KernelBuild]], archs: Sequence[str], place: str = ""
) -> None:
    """Raise BadSource where no arch has a build that compiles; `place` has the launch."""
    told = ""
    for arch in archs:
        kernel = None  # until a build is there: what the record raises is not the kernel's
        try:
            for build in builds(arch):
                kernel = build.kernel
                compile_build(build, arch)
        except BadSource:
            raise
        except Exception as error:
            told = told or _told(kernel, error)
            if place and isinstance(error, cuda.NoKernel):
                told = f"{error}; launched at {place}"
        else:
            if kernel is not None:
                return
    if told:
        raise BadSource(told)


def _told(kernel: Any, error: Exception) -> str:
    """Return what is wrong with a kernel's source, or "" where that is not what failed."""
    if isinstance(error, CompilationError):
        return at_users_line(kernel, error)
    if isinstance(error, cuda.CompileError):
        return str(error)
    if isinstance(kernel, cuda.Kernel):  # a missing file or kernel
        return str(error) if isinstance(error, ValueError) else ""
    return _misfit(kernel, error) if kernel is not None and isinstance(error, TypeError) else ""


def _misfit(kernel: Any, error: TypeError) -> str:
    names = "" if isinstance(kernel, cuda.Kernel) else f"({', '.join(kernel.arg_names)})"
    name = kernel.name if isinstance(kernel, cuda.Kernel) else kernel.__name__
    place = place_of(error) or "the record's builds"
    return f"{place}: the arguments do not fit {name}{names}: {error}"

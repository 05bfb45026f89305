"""Source that runs on no input: what does not compile, and launches that do not fit a kernel.

It is the user's bad input and no broken property; the message holds the compiler's own lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton.compiler.errors import CompilationError
from triton.runtime.jit import get_jit_fn_file_line

from nearlight.core import cuda, triton
from nearlight.core.builds import compile_build
from nearlight.core.errors import BadInput, one_line
from nearlight.core.launch import describe, described_launches
from nearlight.core.op import Op
from nearlight.core.user_code import place_of

COMPILE_ERRORS = (cuda.CompileError, CompilationError)
ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# What a launch is compiled for where there is no GPU.
ARCH = "sm_90"


class BadSource(BadInput):
    """No input can run this source; raised through whatever takes errors for findings."""


def at_users_line(kernel: Any, error: CompilationError) -> str:
    """Return Triton's message with the line of the file, which it counts from the kernel's own."""
    file, start = get_jit_fn_file_line(kernel)
    line = start + getattr(error.node, "lineno", 1) - 1
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    message = getattr(inner, "error_message", None) or one_line(inner)
    return f"{file}:{line}: {message}\n{error}"


def refuse_launch(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> None:
    """Raise BadSource if a launch that raised would do so whatever its tensors hold."""
    try:
        if isinstance(kernel, cuda.Kernel):
            kernel.compile(cuda.own_arch(int(ARCH.removeprefix("sm_"))))
            raise error
        options = triton.launch_options()
        kernel.signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in options})
        with described_launches(None) as builds:
            describe(kernel, args, kwargs)
        compile_build(builds[0], ARCH)
    except CompilationError as found:
        raise BadSource(at_users_line(kernel, found)) from error
    except TypeError as found:
        if isinstance(error, TypeError):
            raise BadSource(_misfit(kernel, error)) from found
    except Exception as found:  # a missing file or kernel, NVRTC's own lines, or nothing of these
        if found is not error and isinstance(kernel, cuda.Kernel):
            raise BadSource(str(found)) from error


def _misfit(kernel: Any, error: TypeError) -> str:
    names = "" if isinstance(kernel, cuda.Kernel) else f"({', '.join(kernel.arg_names)})"
    name = kernel.name if isinstance(kernel, cuda.Kernel) else kernel.__name__
    place = place_of(error) or "the record's builds"
    return f"{place}: the arguments do not fit {name}{names}: {error}"


def refuse_builds(op: Op) -> None:
    """Raise BadSource where the builds of an op compile for no arch."""
    told = ""
    for arch in ARCHES:
        try:
            for build in op.builds(arch):
                compile_build(build, arch)
        except CompilationError as error:
            told = told or at_users_line(build.kernel, error)
        except cuda.CompileError as error:
            told = told or str(error)
        except TypeError as error:
            told = told or _misfit(build.kernel, error)
        except ValueError:  # the op refuses the arch
            continue
        else:
            return
    if told:
        raise BadSource(told)

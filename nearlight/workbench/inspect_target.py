"""What `inspect` is pointed at: an op, a .cu file or a bare Triton kernel, as builds per arch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

import nearlight
from nearlight.core import cuda
from nearlight.core.errors import BadInput
from nearlight.core.op import KernelBuild, Op
from nearlight.core.user_code import split_name
from nearlight.workbench.inspect_cuda import compiled_kernels, is_called, templates_of
from nearlight.workbench.inspect_options import Options, triton_build
from nearlight.workbench.load import load_file, load_op

_OPS = Path(nearlight.__file__).parent / "ops"


@dataclass(frozen=True)
class Target:
    """Kernels to look into.

    Attributes:
        name: what the user named.
        builds: `(arch) -> the kernels as they are compiled for it`.
        op: the record, where it is one.
        options: what the user said beside it, as a shell reads it.
        left_out: what of a file it does not show, and why.
    """

    name: str
    builds: Callable[[str], Sequence[KernelBuild]]
    op: Op | None = None
    options: str = ""
    left_out: str = ""

    @property
    def pasted(self) -> str:
        """The name and the options as a shell reads them."""
        return shlex.quote(self.name) + self.options


def find(name: str, options: Options) -> Target:
    """Return what a target names.

    Args:
        name: an op of ours ("swiglu", "swiglu:kernel"), "file.py", "file.py:NAME" (an Op record or
            a kernel), "file.cu" or "file.cu:kernel<args>".
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
        op_name, _, kernel = name.partition(":")
        op = load_op(op_name)
        if kernel:
            return _kernel_target(name, kernel, None, options, [op])
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
        found = compiled_kernels(path, kernel, arch)
        return [
            KernelBuild(each, {}, {}, num_threads=options.block, shared_bytes=options.shared)
            for each in found
        ]

    left = "" if kernel else ", ".join(templates_of(path))
    return Target(name, builds, left_out=left and f"templates, to be named with arguments: {left}")


def _python_target(name: str, path: Path, attribute: str, options: Options) -> Target:
    members = vars(load_file(path))
    found = members.get(attribute or "OP")
    if isinstance(found, Op):
        if options.types or options.constants:
            raise BadInput(f"{name} is an Op record, whose builds say types and constants")
        return Target(name, found.builds, found)
    kernel = found if isinstance(found, cuda.Kernel) else _unwrapped(found)
    records = [value for value in members.values() if attribute and isinstance(value, Op)]
    if kernel and _OPS in path.resolve().parents:  # our ops launch kernels of other files, too
        from nearlight.ops import OPS

        records = list(OPS.values())
    known = [each for each, value in members.items()
             if isinstance(value, Op | cuda.Kernel) or _unwrapped(value)]  # fmt: skip
    return _kernel_target(name, attribute, kernel, options, records, known)


def _kernel_target(
    name: str,
    called: str,
    kernel: JITFunction[Any] | cuda.Kernel | None,
    options: Options,
    records: Sequence[Op],
    known: Sequence[str] = (),
) -> Target:
    """Return a kernel as the records of its file build it, or else as the options say."""
    texts = (options.types, options.constants)

    def builds(arch: str) -> list[KernelBuild]:
        built: list[KernelBuild] = []
        refusals = []
        for record in records:
            try:
                built += record.builds(arch)
            except ValueError as error:  # it has none for this arch
                refusals.append(error)
        found = [
            each
            for each in built
            if (_is_same(each.kernel, kernel) if kernel else is_called(each.name, called))
        ]
        if not found and refusals and not (any(texts) if kernel else built):
            raise refusals[0]
        if not found and kernel is None:
            raise _no_member(name, called, [*known, *(each.name for each in built)])
        found = found or [KernelBuild(kernel, {}, {})]
        if not isinstance(found[0].kernel, cuda.Kernel):
            found = [triton_build(each, name, *texts) for each in found]
        elif any(texts):
            raise BadInput(f"--types and --constants are for a Triton kernel; not {name}")
        return [each for index, each in enumerate(found) if each not in found[:index]]

    return Target(name, builds)


def _is_same(kernel: Any, other: Any) -> bool:
    """Return whether two kernels are one, or one file's that was loaded twice."""
    if isinstance(kernel, cuda.Kernel) or isinstance(other, cuda.Kernel):
        return bool(kernel == other)
    return bool(kernel.fn.__code__ == other.fn.__code__)


def _no_member(name: str, attribute: str, known: Sequence[str]) -> BadInput:
    file = name.removesuffix(f":{attribute}")
    offered = ", ".join(dict.fromkeys(get_close_matches(attribute, known, cutoff=0.4) or known))
    hint = f"name one of {offered}" if offered else "define OP = Op(...) or a @jit kernel"
    what = f"kernel or Op record called {attribute}" if attribute else "Op record called OP"
    return BadInput(f"{file} has no {what}; {hint}: {file}:NAME")


def _unwrapped(value: Any) -> JITFunction[Any] | None:
    """Return the kernel inside `triton.autotune` and `triton.heuristics`, None for other things."""
    while not isinstance(value, JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, JITFunction) else None

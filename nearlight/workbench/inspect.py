"""`inspect`: what the compiler made of a kernel on each arch, side by side, without a GPU."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from triton.compiler.errors import CompilationError
from triton.errors import TritonError

from nearlight.core import cuda, machine_code, triton
from nearlight.core.builds import compile_build
from nearlight.core.errors import BadInput, one_line
from nearlight.core.hardware import find_gpu
from nearlight.core.machine_code import MachineCode
from nearlight.core.occupancy import Occupancy, occupancy
from nearlight.core.op import KernelBuild
from nearlight.core.progress import Progress, silent
from nearlight.core.register import sparing_others
from nearlight.core.report import Report
from nearlight.core.user_code import place_of, split_name
from nearlight.core.versions import versions
from nearlight.workbench.bad_source import at_users_line
from nearlight.workbench.inspect_advice import advise, gist
from nearlight.workbench.inspect_diff import diff_report
from nearlight.workbench.inspect_target import Options, Target, find

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
_ALL = "all kernels"


@dataclass(frozen=True)
class Look:
    """One kernel as it was compiled for one arch.

    Attributes:
        kernel: its label, the same on every arch.
        arch: "sm_90a".
        build: what was compiled.
        code: the machine code; None where there is none.
        occupancy: None where the threads of a block are not known.
        is_launched_so: whether a launch has that many threads; else they are the most allowed.
        refusal: why there is no machine code.
        constants: what tells it from other builds of the same kernel ("BLOCK_N=64").
    """

    kernel: str
    arch: str
    build: KernelBuild
    code: MachineCode | None = None
    occupancy: Occupancy | None = None
    is_launched_so: bool = True
    refusal: str = ""
    constants: str = ""


def inspect(
    target: str,
    archs: Sequence[str] | None = None,
    other: str | None = None,
    *,
    block: int = 0,
    shared: int = 0,
    types: str = "",
    constants: str = "",
    progress: Progress = silent,
) -> Report:
    """Compile kernels for several archs and say what the machine code does, or compare two.

    Args:
        target: an op of ours, "file.py", "file.py:NAME" (an Op record or a kernel), "file.cu" or
            "file.cu:kernel<args>".
        archs: or GPUs ("h200"); by default sm_80, sm_90a, sm_100a and sm_120a; with `other` one,
            by default sm_90a.
        other: a second target, compared with the first on one arch.
        block: threads of a block of a .cu file's kernels.
        shared: bytes of dynamic shared memory of such a block.
        types: "x_ptr=*bf16,n=i64", arguments of a Triton kernel where neither annotations nor
            a record of its file say them, or other ones.
        constants: "BLOCK=1024,ACC=fp32,num_warps=8", its compile-time constants and launch options.
        progress: called with a line before each compilation.

    Returns:
        A report with one row per kernel and arch; findings hold the advice.

    Raises:
        BadInput: an unknown target, kernel or arch, options that are missing, or a source that
            compiles for none of the archs (with the compiler's own lines).

    Example:
        >>> from nearlight.workbench.inspect import inspect
        >>> print(inspect("rms_norm", ["sm_90a"]).answer)  # doctest: +SKIP
        rms_norm: 6 kernels for sm_90a: no spills, no local arrays, occupancy 50% to 100%
    """
    chosen = _archs(archs or (("sm_90a",) if other else ARCHS))
    options = Options(block, shared, types, constants)
    names = (target, other) if other is not None else (target,)
    if len(names) > 1 and len(chosen) > 1:
        raise BadInput(f"two targets are compared on one arch, not on {', '.join(chosen)}")
    pair: list[Target] = []
    looks: list[list[Look]] = []
    for name in names:
        with sparing_others():
            own = options.fitting(name, names)
            pair.append(replace(find(name, own), options=own.pasted))
            looks.append(_looks(pair[-1], chosen, progress))
    if other is None:
        return _report(pair[0], chosen, looks[0])
    rows = [[row_of(look) for look in each] for each in looks]
    return diff_report(pair, chosen[0], rows, [_lacking(each) for each in looks])


def _archs(names: Sequence[str]) -> list[str]:
    """Return the archs, also of GPUs, with the features of their own ("sm_90a"), each once."""
    found = []
    for name in map(str.strip, names):
        with suppress(BadInput):
            name = find_gpu(name).arch
        try:
            found.append(cuda.own_arch(machine_code.capability_of(name)))
        except ValueError as error:
            raise BadInput(f"--arch: {error}; or a GPU, such as h200") from None
    return list(dict.fromkeys(found))


def _looks(target: Target, archs: Sequence[str], progress: Progress) -> list[Look]:
    """Compile every kernel of a target for every arch; BadInput where one compiles for none."""
    looks = []
    for arch in archs:
        progress(f"{target.name} for {arch}")
        try:
            builds = target.builds(arch)
        except BadInput:
            raise
        except ValueError as error:  # of an op without kernels for this arch, or of the compiler
            place = place_of(error) if isinstance(error, cuda.NoKernel) else ""
            refusal = f"{error}; launched at {place}" if place else str(error)
            looks.append(Look(_ALL, arch, KernelBuild(None, {}, {}), refusal=refusal))
            continue
        except (TypeError, OSError) as error:
            raise BadInput(f"the builds of {target.name} fail: {one_line(error)}") from error
        for (label, constants), build in zip(_labels(builds), builds, strict=True):
            progress(f"{label} for {arch}")
            looks.append(replace(_look(label, arch, build), constants=constants))
    if not looks:
        raise BadInput(f"{target.name} names no kernels: give its Op record `builds`")
    compiled = {look.kernel for look in looks if look.code}
    for look in looks:
        if look.kernel not in compiled and not (compiled and look.kernel == _ALL):
            raise BadInput(look.refusal)
    return looks


def _labels(builds: Sequence[KernelBuild]) -> list[tuple[str, str]]:
    """Return each kernel's name with its pointers' types, and the constants that tell it apart.

    Where name and types are not enough they are numbered, for constants differ between archs.
    """
    labels = []
    for build in builds:
        kinds = (kind[1:].split(":")[0] for kind in build.signature.values() if kind[0] == "*")
        name = build.kernel.name if isinstance(build.kernel, cuda.Kernel) else build.kernel.__name__
        labels.append(" ".join((name, "/".join(dict.fromkeys(kinds)))).strip())
    found = []
    for index, (label, build) in enumerate(zip(labels, builds, strict=True)):
        like = [
            other.constants for other, name in zip(builds, labels, strict=True) if name == label
        ]
        number = f" #{labels[: index + 1].count(label)}" if len(like) > 1 else ""
        own = (f"{name}={value}" for name, value in build.constants.items()
               if any(other.get(name) != value for other in like))  # fmt: skip
        found.append((label + number, " ".join(own)))
    return found


def _look(label: str, arch: str, build: KernelBuild) -> Look:
    try:
        if isinstance(build.kernel, cuda.Kernel):
            code = compile_build(build, arch)
        else:
            code = triton.compile_for(build, arch, is_strict=False)
    except CompilationError as error:
        return Look(label, arch, build, refusal=at_users_line(build.kernel, error))
    except (TypeError, OSError) as error:  # a signature that does not fit, a file that is not there
        raise BadInput(str(error)) from None
    except (ValueError, RuntimeError, TritonError) as error:
        is_told = isinstance(error, ValueError)
        refusal = str(error) if is_told else f"{label} does not compile for {arch}: {error}"
        return Look(label, arch, build, refusal=refusal)
    num_threads = build.num_threads or code.num_threads
    if not num_threads or _lacks_shared_bytes(build, code):
        return Look(label, arch, build, code)
    is_known = bool(build.num_threads) or not isinstance(build.kernel, cuda.Kernel)
    held = occupancy(
        arch, code.registers, num_threads, code.shared_bytes, num_barriers=code.num_barriers
    )
    if 0 < code.num_threads < num_threads:
        held = Occupancy(0, 0, 0.0, "__launch_bounds__")
    return Look(label, arch, replace(build, num_threads=num_threads), code, held, is_known)


def _lacks_shared_bytes(build: KernelBuild, code: MachineCode) -> bool:
    """Return whether a CUDA C++ kernel has an `extern __shared__` array of a size nobody told."""
    if build.shared_bytes or not isinstance(build.kernel, cuda.Kernel):
        return False
    arrays = re.findall(r"\.extern \.shared .*?(\w+)\[\]", code.ptx)
    body = code.ptx.partition(f".entry {code.name}(")[2].partition("\n}")[0]
    return any(re.search(rf"\b{array}\b", body) for array in arrays)


def _lacking(looks: Sequence[Look]) -> str:
    """Return the options that would tell the occupancy where it is not known, with an example."""
    unknown = [(look, look.code) for look in looks if look.code and not look.occupancy]
    options = {
        "--block 256": any(
            not (look.build.num_threads or code.num_threads) for look, code in unknown
        ),
        "--shared 16384": any(_lacks_shared_bytes(look.build, code) for look, code in unknown),
    }
    return " ".join(option for option, lacks in options.items() if lacks)


def row_of(look: Look) -> dict[str, Any]:
    """Return the row of one kernel on one arch: plain numbers by their quantity."""
    row: dict[str, Any] = {"kernel": look.kernel, "arch": look.arch}
    row |= {"constants": look.constants} if look.constants else {}
    if look.code is None:
        return row | {"refusal": gist(look.refusal)}
    code = look.code
    row |= {
        "registers": code.registers,
        "spill_store_bytes": code.spill_store_bytes,
        "spill_load_bytes": code.spill_load_bytes,
        "stack_bytes": code.stack_bytes,
        "local_memory": _local_memory(code),
        "shared_bytes": code.shared_bytes,
    }
    if look.occupancy is not None:
        row |= {
            "num_threads": look.build.num_threads,
            "blocks_per_sm": look.occupancy.blocks_per_sm,
            "occupancy": look.occupancy.share,
            "limited_by": look.occupancy.limited_by if look.occupancy.share < 1 else "nothing",
        }
    return row | {
        "matrix_unit": ", ".join(code.matrix_units) or "none",
        "matrix_instructions": code.matrix_instructions,
        "scalar_fmas": code.count("FFMA", "FFMA2", "DFMA", "HFMA2"),
        **_accesses("load", code.widths(machine_code.GLOBAL_LOADS)),
        **_accesses("store", code.widths(machine_code.GLOBAL_STORES)),
        "tma_copies": code.count(*machine_code.TMA_COPIES),
        "local_loads": code.count("LDL"),
        "local_stores": code.count("STL"),
        "barriers": code.count(*machine_code.BARRIERS),
        "atomics": code.count(*machine_code.ATOMICS),
        "instructions": sum(code.instructions.values()),
    }


def _local_memory(code: MachineCode) -> str:
    """Tell a spill from a local array: both are stack, and only ptxas knows which is which."""
    if not code.spill_bytes:
        return "local array, no spill" if code.stack_bytes else "none"
    # Each spilled register is stored once at least, so a larger stack holds something else, too.
    return "spills, local array" if code.stack_bytes > code.spill_store_bytes else "spills"


def _accesses(what: str, widths: Mapping[int, int]) -> dict[str, int]:
    if not widths:
        return {f"global_{what}s": 0}
    widest, *narrower = widths
    return {
        f"global_{what}s": sum(widths.values()),
        f"widest_{what}_bits": widest,
        f"narrower_{what}s": sum(widths[bits] for bits in narrower),
    }


def _report(target: Target, archs: Sequence[str], looks: Sequence[Look]) -> Report:
    findings = advise(looks)
    kernels = list(dict.fromkeys(look.kernel for look in looks))
    number = len(kernels) - (_ALL in kernels)
    num = "1 kernel" if number == 1 else f"{number} kernels"
    answer = f"{target.name}: {findings[0].title}" if findings else ""
    if len(findings) > 1:
        answer += f", and {len(findings) - 1} more"
    next_step = _on_gpu(target, looks) if target.op else ""
    setup = (f"{num}, compiled for {', '.join(archs)}; counts are of instructions as they stand in "
             "the code, not as often as they run")  # fmt: skip
    if target.left_out:
        setup += f"; left out: {target.left_out}"
    if lacking := _lacking(looks):
        setup += f"; for the occupancy say what it is launched with: {lacking}"
        next_step = f"for the occupancy: nearlight inspect {target.pasted} {lacking}"
    return Report(
        verb="inspect",
        answer=answer or f"{target.name}: {num} for {', '.join(archs)}: {_summary(looks)}",
        target=target.name,
        setup=setup,
        versions=versions(),
        findings=findings,
        rows=[row_of(look) for look in sorted(looks, key=lambda look: kernels.index(look.kernel))],
        next=next_step
        or f"compare: nearlight inspect --diff {shlex.quote(target.name)} OTHER{target.options}",
    )


def _on_gpu(target: Target, looks: Sequence[Look]) -> str:
    """Return what comes next; of the user's CUDA C++ nothing has run where there was no GPU."""
    name = shlex.quote(target.name)
    is_unproved = split_name(target.name)[0] and any(
        isinstance(look.build.kernel, cuda.Kernel) for look in looks
    )
    proof = f"nearlight check {name} --device cuda && " if is_unproved else ""
    return f"with a GPU: {proof}nearlight bench {name}"


def _summary(looks: Sequence[Look]) -> str:
    """Return what holds for kernels of which nothing has to be said."""
    parts = ["no spills, no local arrays"]
    shares = sorted(look.occupancy.share for look in looks if look.occupancy)
    if shares:
        low, high = f"{shares[0]:.0%}", f"{shares[-1]:.0%}"
        parts.append(f"occupancy {low}" if low == high else f"occupancy {low} to {high}")
    units = dict.fromkeys(unit for look in looks if look.code for unit in look.code.matrix_units)
    return ", ".join([*parts, *([f"tensor cores by {', '.join(units)}"] if units else [])])

"""Property 12: every kernel compiles for every arch and keeps its budget there."""

from __future__ import annotations

from collections.abc import Iterator

from triton.compiler.errors import CompilationError

from nearlight.core.builds import check_budget, compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.cuda_messages import errors_in
from nearlight.core.machine_code import ARCHES
from nearlight.core.op import Op
from nearlight.workbench.bad_source import BadSource, builds_of, refuse_builds
from nearlight.workbench.property import NotApplicable, Property, any_case, plural, remark
from nearlight.workbench.trial import Trial

# It is compiled where an op has builds for it; an op may refuse it.
MAY_BE_REFUSED = "sm_75"
# What the quick check compiles CUDA C++ for: without a GPU it says no more of such an op.
QUICK_ARCH = "sm_90"
FIRST_OF_EACH = ", the first build of each kernel"


def trials(op: Op, quick: bool, device: str) -> Iterator[Trial]:
    """Each arch once, on the record's builds; no input is made."""
    if not any(builds_of(op, arch) for arch in ARCHES if arch != MAY_BE_REFUSED):
        raise NotApplicable("the record names no builds")
    if quick and not any(isinstance(build.kernel, Kernel) for build in builds_of(op, QUICK_ARCH)):
        raise NotApplicable("the full check compiles for every arch")
    for arch in (QUICK_ARCH + FIRST_OF_EACH,) if quick else ARCHES:
        yield Trial(any_case(op), step=arch)


def examine(op: Op, trial: Trial, device: str) -> str:
    """Compile the builds for the arch that `step` names, and hold each to its budget."""
    arch = trial.step.removesuffix(FIRST_OF_EACH)
    try:
        builds = named = builds_of(op, arch)
        if arch != trial.step:
            first = {build.name.partition("<")[0]: build for build in reversed(named)}
            builds = [*first.values()]
        codes = [compile_build(build, arch) for build in builds]
    except BadSource:
        raise
    except (ValueError, TypeError, CompilationError) as error:
        reason = str(error).strip().splitlines()
        if arch != MAY_BE_REFUSED:
            refuse_builds(op)
            told = next(iter(errors_in(str(error))), " ".join(reason))
            return f"{op.name} does not compile for {arch}: {told}"
        remark(f"{arch} is refused: {reason[0]}")
        return ""
    violations = [
        line
        for build, code in zip(builds, codes, strict=True)
        for line in check_budget(build, code)
    ]
    if violations:
        more = f" ({len(violations) - 1} more)" if len(violations) > 1 else ""
        return violations[0] + more
    if codes:
        registers, spills, array = (
            max(getattr(c, n) for c in codes) for n in ("registers", "spill_bytes", "array_bytes")
        )
        kernels = plural(len(codes), "kernel")
        if len(builds) < len(named):
            kernels = f"the first build of {'each of ' * (len(codes) > 1)}{kernels}"
        remark(f"{kernels}, {f'{spills} bytes of' if spills else 'no'} spills", arch)
        if array:
            remark(f"a local array of {array:,} bytes", arch)
        remark(f"at most {registers} registers", arch)
    return ""


PROPERTY = Property(
    12,
    "machine code",
    "every kernel compiles for every arch and keeps its budget",
    trials,
    examine,
    True,
)

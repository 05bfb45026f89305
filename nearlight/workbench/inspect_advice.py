"""Advice that facts allow: what the machine code shows, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nearlight.core import cuda, triton
from nearlight.core.builds import past_block_limits, past_launch_bounds
from nearlight.core.cuda_messages import errors_in
from nearlight.core.machine_code import GLOBAL_LOADS, GLOBAL_STORES
from nearlight.core.occupancy import occupancy
from nearlight.core.report import Finding
from nearlight.workbench.bad_source import place_of_kernel
from nearlight.workbench.property import plural

if TYPE_CHECKING:
    from nearlight.workbench.inspect import Look

# Below this share of an SM's warps there are few to hide the latency of memory behind.
_LOW_OCCUPANCY = 0.25
_FULL_WIDTH_BITS = 128


@dataclass(frozen=True)
class Advice:
    """A kind of advice.

    Attributes:
        title: what is so, before " on sm_80".
        evidence: `(look) -> the numbers that show it`, "" where it does not hold.
        cause: why it is so.
        next_step: `(look) -> what to do`.
    """

    title: str
    evidence: Callable[[Look], str]
    cause: str
    next_step: Callable[[Look], str]


def advise(looks: Sequence[Look]) -> list[Finding]:
    """Return a finding per kernel and kind of advice, the gravest first, its archs together."""
    kernels = list(dict.fromkeys(look.kernel for look in looks))
    findings = []
    for advice in _ADVICE:
        for kernel in kernels:
            shown = [(look, advice.evidence(look)) for look in looks if look.kernel == kernel]
            shown = [(look, evidence) for look, evidence in shown if evidence]
            if not shown:
                continue
            by_evidence: dict[str, list[str]] = {}
            for look, evidence in shown:
                by_evidence.setdefault(evidence, []).append(look.arch)
            archs = ", ".join(look.arch for look, _ in shown)
            findings.append(
                Finding(
                    title=f"{advice.title} on {archs}" + (f" ({kernel})" if kernels[1:] else ""),
                    evidence="; ".join(f"{', '.join(on)}: {e}" for e, on in by_evidence.items()),
                    cause=advice.cause,
                    fix="",
                    gain_ms=0.0,
                    gain_bytes=0,
                    next_step=advice.next_step(shown[0][0]),
                )
            )
    return findings


def gist(refusal: str) -> str:
    """Return the errors among a compiler's lines, or else the first line."""
    return "; ".join(errors_in(refusal)) or refusal.partition("\n")[0]


def _no_code(look: Look) -> str:
    return gist(look.refusal)


def _no_launch(look: Look) -> str:
    return "" if look.code is None else _placed(look, past_block_limits(look.build, look.code)[0])


def _to_launch(look: Look) -> str:
    assert look.code is not None
    return past_block_limits(look.build, look.code)[1]


def _past_launch_bounds(look: Look) -> str:
    return "" if look.code is None else _placed(look, past_launch_bounds(look.build, look.code)[0])


def _to_keep_launch_bounds(look: Look) -> str:
    assert look.code is not None
    return past_launch_bounds(look.build, look.code)[1]


def _placed(look: Look, what: str) -> str:
    return what and f"{place_of_kernel(look.build.kernel)}: {what}"


def _no_tensor_cores(look: Look) -> str:
    code = look.code
    if code is None or code.matrix_instructions:
        return ""
    if not (look.build.uses_tensor_cores or code.has_dot):
        return ""
    scalar = plural(code.count("FFMA", "DFMA", "HFMA2"), "scalar multiply-add")
    return f"no matrix instruction, {scalar}"


def _for_tensor_cores(look: Look) -> str:
    if look.arch == "sm_75":
        return "for sm_75 Triton has no matrix instructions: use CUDA C++ with mma.sync there"
    return "tl.dot uses them for fp16, bf16, int8 and fp8, and for fp32 with input_precision='tf32'"


def _bf16_in_software(look: Look) -> str:
    has_bf16 = look.arch == "sm_75" and look.code is not None and "bf16" in look.code.ttir
    return "its values are converted by integer instructions" if has_bf16 else ""


def _spills(look: Look) -> str:
    code = look.code
    if code is None or not code.spill_bytes:
        return ""
    return (
        f"{code.spill_store_bytes} bytes of spill stores and {code.spill_load_bytes} of loads at "
        f"{code.registers} registers"
    )


def _against_spills(look: Look) -> str:
    if isinstance(look.build.kernel, cuda.Kernel):
        return "keep fewer values alive at once, or allow more registers by __launch_bounds__"
    return f"a smaller tile, or more than {look.build.num_warps} warps to share it (num_warps)"


def _local_array(look: Look) -> str:
    code = look.code
    if code is None or code.spill_bytes or not code.count("LDL", "STL"):
        return ""
    return (
        f"{code.stack_bytes} bytes of stack and no spill: "
        f"{plural(code.count('LDL'), 'local load')}, {plural(code.count('STL'), 'local store')}"
    )


def _few_warps(look: Look) -> str:
    """Say that registers keep an SM nearly empty; tensor-core kernels live well with that."""
    code, held = look.code, look.occupancy
    if code is None or held is None or not look.is_launched_so:
        return ""
    if code.matrix_instructions or not held.blocks_per_sm:
        return ""
    if held.share >= _LOW_OCCUPANCY or "registers" not in held.limited_by:
        return ""
    return (
        f"{code.registers} registers × {look.build.num_threads} threads: {held.warps_per_sm} warps "
        f"on an SM, {held.share:.0%} of what it holds"
    )


def _more_warps(look: Look) -> str:
    code, held = look.code, look.occupancy
    assert code is not None and held is not None
    for registers in range(code.registers - 1, 0, -1):
        better = occupancy(
            look.arch,
            registers,
            look.build.num_threads,
            code.shared_bytes,
            num_barriers=code.num_barriers,
        )
        if better.blocks_per_sm > held.blocks_per_sm:
            return (
                f"with {registers} registers an SM holds {better.blocks_per_sm} blocks instead of "
                f"{held.blocks_per_sm}: keep fewer values alive at once, or take a smaller tile"
            )
    return "something else limits the blocks as well: take a smaller block"


def _narrow(look: Look) -> str:
    """Compile once more with every integer a multiple of 16, and say what that widens."""
    code, names = look.code, _loose_integers(look)
    if code is None or not names:
        return ""
    if _widest(code.widths(GLOBAL_LOADS), code.widths(GLOBAL_STORES)) >= _FULL_WIDTH_BITS:
        return ""
    aligned = {name: f"{look.build.signature[name].split(':')[0]}:16" for name in names}
    build = replace(look.build, signature={**look.build.signature, **aligned})
    other = triton.compile_for(build, look.arch, is_strict=False)
    parts = []
    for what, opcodes in (("loads", GLOBAL_LOADS), ("stores", GLOBAL_STORES)):
        now, then = _widest(code.widths(opcodes)), _widest(other.widths(opcodes))
        if then > now:
            parts.append(f"{what} {now} → {then} bits")
    given = f"with {', '.join(names)} a multiple of 16: "
    return given + ", ".join(parts) if parts else ""


def _loose_integers(look: Look) -> list[str]:
    """Return the integer arguments of a Triton kernel that are not known to be multiples of 16."""
    kinds = look.build.signature.items()
    return [name for name, kind in kinds if kind in ("i32", "i64", "i32:1", "i64:1")]


def _widest(*widths: Iterable[int]) -> int:
    return max((bits for each in widths for bits in each), default=0)


def _widen(look: Look) -> str:
    names = ", ".join(_loose_integers(look))
    return (
        f"a launch that gives multiples of 16 for {names} compiles to it by itself, unless "
        "do_not_specialize forbids it; pad sizes that are none"
    )


_ADVICE = (
    Advice(
        "no machine code",
        _no_code,
        "",
        lambda look: "leave this arch out, or compile another kernel for it",
    ),
    Advice(
        "cannot be launched",
        _no_launch,
        "a block asks for more than an SM has",
        _to_launch,
    ),
    Advice(
        "cannot be launched",
        _past_launch_bounds,
        "registers were shared out for the threads that __launch_bounds__ allows",
        _to_keep_launch_bounds,
    ),
    Advice(
        "no tensor cores",
        _no_tensor_cores,
        "the product of matrices was compiled to scalar instructions",
        _for_tensor_cores,
    ),
    Advice(
        "bf16 in software",
        _bf16_in_software,
        "the arch has no instruction for bf16",
        lambda look: "use fp16 or fp32 there",
    ),
    Advice(
        "registers spill",
        _spills,
        "more values are alive at once than the thread has registers",
        _against_spills,
    ),
    Advice(
        "a local array",
        _local_array,
        "an array that is indexed at run time cannot stay in registers",
        lambda look: "unroll its loops so that every index is a constant, or use shared memory",
    ),
    Advice(
        "registers allow few warps",
        _few_warps,
        "registers are given to all warps at once",
        _more_warps,
    ),
    Advice(
        "narrow accesses",
        _narrow,
        "the compiler must not assume that rows and masks begin at a multiple of 16 bytes",
        _widen,
    ),
)

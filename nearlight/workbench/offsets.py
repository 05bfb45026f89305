"""Static scan: no 32-bit product of an index and a size or stride becomes a pointer offset.

Such a product wraps beyond 2³¹ elements. Triton kernels are read as TTIR, in which every value has
one definition and nothing is optimised away; CUDA C++ kernels as PTX. Both become a list of steps,
on which one rule is decided: a 32-bit product of an argument and of anything known at run time
only, that reaches an address by sums and constant factors alone, is a fault. No fault is

- what is multiplied by a run-time value once more, in 64 bits, or compared with one in 32: it is
  an index, and stays below the size that it is compared with;
- a quotient times its divisor; a size over 16 or more, which counts tiles;
- the product of an index and a compile-time constant: a tile's size looks no different. But it is
  one where it is held, in 64 bits, to an argument that is used for nothing else, as a kernel on
  any number of elements does.

What a helper returns that stays a call in the machine code (`noinline`) is not followed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from nearlight.core.machine_code import MachineCode
from nearlight.workbench.offset_steps import Step, read_steps

_NONE: frozenset[str] = frozenset()
Uses = Mapping[str, Sequence[Step]]


def narrow_products(code: MachineCode) -> list[str]:
    """Return where a kernel computes an offset by a 32-bit product, one line each; [] where sound.

    Args:
        code: of `nearlight.core.builds.compile_build`, of either language.

    Example:
        >>> narrow_products(compile_build(build, "sm_90"))  # doctest: +SKIP
        ['kernels.py:12: 32-bit product of an index and a size or stride ...']
    """
    return [
        f"{place}: 32-bit product of {factors} in a pointer "
        "offset wraps beyond 2³¹ elements; cast one factor to 64 bits"
        for place, factors in dict.fromkeys(_faults(list(read_steps(code))))
    ]


def _faults(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Yield the place of each product that breaks the rule, and its factors."""
    origins = _origins(steps)
    uses: dict[str, list[Step]] = defaultdict(list)
    made: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        made[step.result].append(step)
        for operand in step.operands:
            uses[operand].append(step)
    counts = _counts(steps, uses, origins)
    for step in steps:
        # A loop that adds a size each time holds the product of its counter, strength-reduced.
        is_recurrence = step.kind == "sum32" and step.result in step.operands
        if step.kind != "product" and not is_recurrence:
            continue
        left, right = step.operands[:2]
        froms = [origins.get(operand, _NONE) for operand in (left, right)]
        if not is_recurrence and set(froms) == {_NONE, frozenset(("index",))}:
            reached = _carried(step.result, uses, origins)
            if any(use in counts for use in reached) and (place := _address(reached)):
                yield step.place or place, "an index and a constant"
        if not all(froms) or not any("argument" in origin for origin in froms):
            continue
        if is_recurrence and "argument" not in froms[left == step.result]:
            continue
        if _is_quotient(made[left], right) or _is_quotient(made[right], left):
            continue
        if place := _address(_carried(step.result, uses, origins)):
            yield step.place or place, "an index and a size or stride"


def _origins(steps: Sequence[Step]) -> dict[str, frozenset[str]]:
    """Return for each value whether arguments and indices went into it; constants have neither."""
    origins: dict[str, frozenset[str]] = {}
    is_open = True
    while is_open:  # loops feed values back
        is_open = False
        for step in steps:
            if step.kind in ("argument", "index"):
                found = frozenset((step.kind,))
            elif step.kind == "address":
                continue
            else:
                parts = step.operands[:1] if step.kind in ("quotient", "tiles") else step.operands
                found = _NONE.union(*(origins.get(part, _NONE) for part in parts))
                found -= {"argument"} if step.kind == "tiles" else _NONE
            if not found <= origins.get(step.result, _NONE):
                origins[step.result] = origins.get(step.result, _NONE) | found
                is_open = True
    return origins


def _is_quotient(made: Sequence[Step], divisor: str) -> bool:
    return any(step.kind == "quotient" and divisor in step.operands[1:] for step in made)


def _carried(value: str, uses: Uses, origins: Mapping[str, frozenset[str]]) -> list[Step]:
    """Return every step that a value reaches by sums and constant factors."""
    seen, waiting, reached = {value}, [value], []
    while waiting:
        value = waiting.pop(0)
        for step in uses.get(value, ()):
            reached.append(step)
            others = [operand for operand in step.operands if operand != value]
            is_scaled = step.kind in ("product", "scaled") and not any(map(origins.get, others))
            if (step.kind.startswith("sum") or is_scaled) and step.result not in seen:
                seen.add(step.result)
                waiting.append(step.result)
    return reached


def _address(reached: Sequence[Step]) -> str:
    """Return the place of the first address, "" where there is none or a bound: an index."""
    if any(step.kind == "bound" for step in reached):
        return ""
    places = (step.place or "an unknown line" for step in reached if step.kind == "address")
    return next(places, "")


def _counts(steps: Sequence[Step], uses: Uses, origins: Mapping[str, frozenset[str]]) -> list[Step]:
    """Return the comparisons in 64 bits with an argument that counts and does nothing else."""
    found: list[Step] = []
    for step in steps:
        reached = _carried(step.result, uses, origins) if step.kind == "argument" else []
        if all(use.kind in ("sum", "sum32", "tiles", "bound", "wide bound") for use in reached):
            found += [use for use in reached if use.kind == "wide bound"]
    return found

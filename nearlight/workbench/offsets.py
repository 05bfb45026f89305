"""Static scan: no 32-bit product of an index and a size or stride becomes a pointer offset.

Such a product wraps beyond 2³¹ elements. Triton kernels are read as TTIR, in which every value has
one definition and nothing is optimised away; CUDA C++ kernels as PTX. Both become a list of steps,
on which one rule is decided: a 32-bit product of an argument and of anything known at run time
only, that reaches an address by sums and constant factors alone, is a fault. No fault is

- what is multiplied by a run-time value once more, in 64 bits, or compared with one in 32: it is
  an index, and stays below the size that it is compared with;
- a quotient times its divisor; a size over 16 or more, which counts tiles;
- the product of an index and a compile-time constant: a tile's size looks no different.

What a helper returns that stays a call in the machine code (`noinline`) is not followed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nearlight.core.machine_code import MachineCode

# A size over this or more counts tiles; over less, vectors of elements.
MIN_TILE = 16
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Step:
    """One operation; `kind` is all that the rule needs to know of it.

    Kinds: argument and index are origins; sum carries its operands on; product is one of 32 bits,
    scaled another; quotient is of a run-time divisor, tiles of a constant one; bound compares in
    32 bits; address is an access or pointer; other only depends on its operands.
    """

    kind: str
    result: str
    operands: Sequence[str] = ()
    place: str = ""


def narrow_products(code: MachineCode) -> list[str]:
    """Return where a kernel computes an offset by a 32-bit product, one line each; [] where sound.

    Args:
        code: of `nearlight.core.builds.compile_build`, of either language.

    Example:
        >>> narrow_products(compile_build(build, "sm_90"))  # doctest: +SKIP
        ['kernels.py:12: 32-bit product of an index and a size or stride ...']
    """
    steps = list(_ttir_steps(code.ttir) if code.ttir else _ptx_steps(code.ptx, code.name))
    return [
        f"{place}: 32-bit product of an index and a size or stride in a pointer "
        "offset wraps beyond 2³¹ elements; cast one factor to 64 bits"
        for place in dict.fromkeys(_faults(steps))
    ]


def _faults(steps: Sequence[_Step]) -> Iterator[str]:
    """Yield the place of each product that breaks the rule."""
    origins = _origins(steps)
    uses: dict[str, list[_Step]] = defaultdict(list)
    made: dict[str, list[_Step]] = defaultdict(list)
    for step in steps:
        made[step.result].append(step)
        for operand in step.operands:
            uses[operand].append(step)
    for step in steps:
        # A loop that adds a size each time holds the product of its counter, strength-reduced.
        is_recurrence = step.kind == "sum32" and step.result in step.operands
        if step.kind != "product" and not is_recurrence:
            continue
        left, right = step.operands[:2]
        froms = [origins.get(operand, _NONE) for operand in (left, right)]
        if not all(froms) or not any("argument" in origin for origin in froms):
            continue
        if is_recurrence and "argument" not in froms[left == step.result]:
            continue
        if _is_quotient(made[left], right) or _is_quotient(made[right], left):
            continue
        if place := _reached(step.result, uses, origins):
            yield step.place or place


def _origins(steps: Sequence[_Step]) -> dict[str, frozenset[str]]:
    """Return for each value whether arguments and indices went into it; constants have neither."""
    origins: dict[str, frozenset[str]] = {}
    is_open = True
    while is_open:  # loops feed values back
        is_open = False
        for step in steps:
            if step.kind in ("argument", "index"):
                found = frozenset((step.kind,))
            elif step.kind in ("address", "bound"):
                continue
            else:
                parts = step.operands[:1] if step.kind in ("quotient", "tiles") else step.operands
                found = _NONE.union(*(origins.get(part, _NONE) for part in parts))
                found -= {"argument"} if step.kind == "tiles" else _NONE
            if not found <= origins.get(step.result, _NONE):
                origins[step.result] = origins.get(step.result, _NONE) | found
                is_open = True
    return origins


def _is_quotient(made: Sequence[_Step], divisor: str) -> bool:
    return any(step.kind == "quotient" and divisor in step.operands[1:] for step in made)


def _reached(value: str, uses: dict[str, list[_Step]], origins: dict[str, frozenset[str]]) -> str:
    """Return the place of an address that a value reaches, "" where it is none or an index."""
    seen, waiting, place = {value}, [value], ""
    while waiting:
        value = waiting.pop(0)
        for step in uses[value]:
            others = [operand for operand in step.operands if operand != value]
            is_scaled = step.kind in ("product", "scaled") and not any(map(origins.get, others))
            if step.kind == "bound":
                return ""
            if step.kind == "address":
                place = place or step.place or "an unknown line"
            elif (step.kind.startswith("sum") or is_scaled) and step.result not in seen:
                seen.add(step.result)
                waiting.append(step.result)
    return place


def _divided(result: str, operands: Sequence[str], divisor: int | None, place: str) -> _Step:
    """Return the step of a division, by a constant where its value is given."""
    if divisor is None:
        return _Step("quotient", result, operands, place)
    return _Step("tiles" if abs(divisor) >= MIN_TILE else "other", result, operands[:1], place)


# Triton ------------------------------------------------------------------------------------------

_SUMS = frozenset(
    "arith.addi arith.subi arith.extsi arith.extui arith.trunci arith.select arith.index_cast "
    "tt.splat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.unsplat".split()
)
_VALUE = re.compile(r"%[\w$.#-]+")
_CONSTANT = re.compile(r"arith\.constant (?:dense<)?(-?\d+)>? :")
_OPERATION = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
_INITIAL = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")


def _ttir_steps(text: str) -> Iterator[_Step]:
    places = _places(text)
    constants: dict[str, int] = {}
    regions: list[list[tuple[str, ...]]] = []  # what each value of a yield goes into
    num_functions = 0
    for line in text.splitlines():
        body = line.strip()
        if body.startswith("#loc"):
            continue
        if body.startswith("tt.func"):
            num_functions += 1
            for name in re.findall(r"%([\w$.-]+): i\d+", body):
                yield _Step("argument", f"%{num_functions}.{name}")
        # a name belongs to its function
        whole = body.replace("%", f"%{num_functions}.")
        body, _, location = whole.partition(" loc(")
        place = places.get(location.removesuffix(")"), "")
        targets: list[tuple[str, ...]] = []
        if body.startswith("}"):
            targets = regions.pop()
        elif body.startswith("^"):
            yield from (_Step("index", value) for value in _VALUE.findall(whole))
        elif (match := _OPERATION.fullmatch(body)) and not body.startswith("tt.func"):
            result, count, opcode, rest = match.groups("")
            results = [f"{result}#{i}" for i in range(int(count))] if count else [result]
            if constant := _CONSTANT.search(body):
                constants[result] = int(constant[1])
            elif opcode in ("scf.yield", "scf.condition"):
                values = _VALUE.findall(rest)[opcode == "scf.condition" :]
                for value, names in zip(values, regions[-1], strict=False):
                    yield from (_Step("sum", name, (value,)) for name in names)
            elif opcode in ("scf.for", "scf.while", "scf.if"):
                if opcode == "scf.for":
                    yield _Step("index", _VALUE.findall(rest)[0])
                header = rest.partition("iter_args")[2] if opcode == "scf.for" else rest
                initial = _INITIAL.findall(header)
                inner = [name for name, _ in initial] or [""] * len(results)
                targets = list(zip(results, inner, strict=False))
                for names, (_, value) in zip(targets, initial, strict=False):
                    yield from (_Step("sum", name, (value,)) for name in names)
            else:
                for name in results:
                    yield from _ttir_step(opcode, name, rest, constants, place)
        if line.rstrip().endswith("{"):
            regions.append(targets)


def _ttir_step(
    opcode: str, result: str, rest: str, constants: dict[str, int], place: str
) -> Iterator[_Step]:
    operands = _VALUE.findall(rest.partition(" : ")[0])
    is_narrow = bool(re.search(r"(?:^|x)i32\b", rest.rpartition(" : ")[2].strip()))
    divisor = constants.get(operands[-1]) if operands else None
    _, _, name = opcode.partition(".")
    if opcode == "tt.addptr":
        yield _Step("address", result, operands[1:], place)
    elif opcode in ("tt.get_program_id", "tt.make_range", "tt.load") or "atomic" in name:
        yield _Step("index", result)
    elif opcode in _SUMS:
        yield _Step("sum", result, operands)
    elif name in ("muli", "shli"):
        kind = "product" if name == "muli" and is_narrow else "scaled"
        yield _Step(kind, result, operands, place)
    elif "div" in name and name.endswith("i"):
        yield _divided(result, operands, divisor, place)
    elif name in ("shrsi", "shrui") and divisor is not None:
        yield _divided(result, operands, 1 << divisor, place)
    elif name in ("remsi", "remui"):
        yield _Step("quotient", result, operands[:1])
    else:
        yield _Step("other", result, operands)
    if is_narrow and re.fullmatch(r"cmpi|(?:min|max)[su]i", name):
        yield _Step("bound", "", operands)


def _places(text: str) -> dict[str, str]:
    """Return "file:line" of each location of the text, that of the innermost call."""
    raw = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def resolve(content: str) -> str:
        if match := re.match(r'"([^"]*)":(\d+):', content):
            return f"{PurePath(match[1]).name}:{match[2]}"
        found = (resolve(raw.get(name, "")) for name in re.findall(r"#loc\d*", content))
        return next(filter(None, found), "")

    return {name: resolve(content) for name, content in raw.items()}


# CUDA C++ ----------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([\w.:]+)\s+(.*);")
_SOURCE = re.compile(r"%\w+(?:\.\w+)?|-?\b(?:0[xX][0-9a-fA-F]+|\d+)\b")
_OTHER_SPACES = {"shared", "local", "const", "param"}
_CARRIED = ("add", "sub", "mov", "cvt", "cvta", "selp", "or", "neg")
_INDICES = ("%tid", "%ctaid", "%laneid", "%warpid", "%clusterid", "%cluster_cta")


def _ptx_steps(text: str, symbol: str) -> Iterator[_Step]:
    files = {number: PurePath(name).name for number, name in
             re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}  # fmt: skip
    _, _, kernel = text.partition(f".entry {symbol}(")
    place = ""
    counts: dict[str, int] = defaultdict(int)
    for line in re.split(r"^\}", kernel, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        body = line.strip(" \t{}")  # inline assembly stands in braces
        if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", body):
            place = f"{files.get(match[1], 'an unknown file')}:{match[2]}"
        elif match := _INSTRUCTION.fullmatch(body):
            for step in _ptx_step(match[1], match[2], symbol, place):
                counts[step.result] += 1
                if counts[step.result] == 2 and step.result:  # a loop's counter, or a choice
                    yield _Step("index", step.result)
                yield step


def _ptx_step(opcode: str, rest: str, symbol: str, place: str) -> Iterator[_Step]:
    name, *modifiers = opcode.split(".")
    is_narrow = modifiers[-1:] and modifiers[-1] in ("s32", "u32", "b32")
    spaces = {modifier.partition(":")[0] for modifier in modifiers}
    has_result = name not in ("st", "red", "bra", "prefetch", "ret", "bar", "call")
    head, _, tail = rest.partition("},") if rest.startswith("{") else rest.partition(",")
    results = _SOURCE.findall(head) if has_result else []
    operands = _SOURCE.findall(tail if has_result else rest)
    result = results[0] if results else ""
    number = _number(operands[1]) if len(operands) > 1 else None
    product = "product" if is_narrow and modifiers[0] == "lo" else "scaled"
    if name == "ld" and "param" in modifiers:
        is_own = f"[{symbol}_param" in rest
        yield from (_Step("argument" if is_own else "index", value) for value in results)
    elif "[" in rest and ("global" in spaces or not spaces & _OTHER_SPACES):
        yield _Step("address", "", re.findall(r"\[\s*(%rd\w*)", rest), place)
        yield from (_Step("index", value) for value in results)
    elif name == "mov" and operands[:1] and operands[0].startswith(_INDICES):
        yield _Step("index", result)
    elif name in _CARRIED:
        kind = "sum32" if name in ("add", "sub") and is_narrow else "sum"
        yield from (_Step(kind, value, operands) for value in results)
    elif name == "mul" and modifiers[0] in ("lo", "wide"):
        yield _Step(product, result, operands)
    elif name == "mad" and modifiers[0] in ("lo", "wide"):
        yield _Step(product, f"{result}'", operands[:2])
        yield _Step("sum", result, (f"{result}'", operands[2]))
    elif name == "shl":
        yield _Step("scaled", result, operands)
    elif name in ("div", "shr") or (name == "mul" and number is not None):  # mul.hi: by a constant
        divisor = 1 << number if name == "shr" and number is not None else number
        yield _divided(result, operands, MIN_TILE if name == "mul" else divisor, place)
    elif name == "rem":
        yield _Step("quotient", result, operands[:1])
    else:
        yield from (_Step("other", value, operands) for value in results)
    if is_narrow and name in ("setp", "min", "max"):
        yield _Step("bound", "", operands)


def _number(text: str) -> int | None:
    return None if text.startswith("%") else int(text, 0)

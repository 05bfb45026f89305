"""What a kernel computes, as steps for the scan of its offsets: read from TTIR, or from PTX."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nearlight.core.machine_code import MachineCode

# A size over this or more counts tiles; over less, vectors of elements.
MIN_TILE = 16


@dataclass(frozen=True)
class Step:
    """One operation; `kind` is all that the rule needs to know of it.

    Kinds: argument and index are origins; sum carries its operands on; product is one of 32 bits,
    scaled another; quotient is of a run-time divisor, tiles of a constant one; bound compares in
    32 bits, wide bound in 64; address is an access or pointer; other only depends on its operands.
    """

    kind: str
    result: str
    operands: Sequence[str] = ()
    place: str = ""


def read_steps(code: MachineCode) -> Iterator[Step]:
    """Yield the steps of a kernel: of TTIR where it has one, which is Triton's, else of PTX."""
    yield from _ttir_steps(code.ttir) if code.ttir else _ptx_steps(code.ptx, code.name)


def _divided(result: str, operands: Sequence[str], divisor: int | None, place: str) -> Step:
    """Return the step of a division, by a constant where its value is given."""
    if divisor is None:
        return Step("quotient", result, operands, place)
    return Step("tiles" if abs(divisor) >= MIN_TILE else "other", result, operands[:1], place)


# Triton ------------------------------------------------------------------------------------------

_SUMS = frozenset(
    "arith.addi arith.subi arith.extsi arith.extui arith.trunci arith.select arith.index_cast "
    "tt.splat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.unsplat".split()
)
_VALUE = re.compile(r"%[\w$.#-]+")
_CONSTANT = re.compile(r"arith\.constant (?:dense<)?(-?\d+)>? :")
_OPERATION = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
_INITIAL = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")


def _ttir_steps(text: str) -> Iterator[Step]:
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
                yield Step("argument", f"%{num_functions}.{name}")
        # a name belongs to its function
        whole = body.replace("%", f"%{num_functions}.")
        body, _, location = whole.partition(" loc(")
        place = places.get(location.removesuffix(")"), "")
        targets: list[tuple[str, ...]] = []
        if body.startswith("}"):
            targets = regions.pop()
        elif body.startswith("^"):
            yield from (Step("index", value) for value in _VALUE.findall(whole))
        elif (match := _OPERATION.fullmatch(body)) and not body.startswith("tt.func"):
            result, count, opcode, rest = match.groups("")
            results = [f"{result}#{i}" for i in range(int(count))] if count else [result]
            if constant := _CONSTANT.search(body):
                constants[result] = int(constant[1])
            elif opcode in ("scf.yield", "scf.condition"):
                values = _VALUE.findall(rest)[opcode == "scf.condition" :]
                for value, names in zip(values, regions[-1], strict=False):
                    yield from (Step("sum", name, (value,)) for name in names)
            elif opcode in ("scf.for", "scf.while", "scf.if"):
                if opcode == "scf.for":
                    yield Step("index", _VALUE.findall(rest)[0])
                header = rest.partition("iter_args")[2] if opcode == "scf.for" else rest
                initial = _INITIAL.findall(header)
                inner = [name for name, _ in initial] or [""] * len(results)
                targets = list(zip(results, inner, strict=False))
                for names, (_, value) in zip(targets, initial, strict=False):
                    yield from (Step("sum", name, (value,)) for name in names)
            else:
                for name in results:
                    yield from _ttir_step(opcode, name, rest, constants, place)
        if line.rstrip().endswith("{"):
            regions.append(targets)


def _ttir_step(
    opcode: str, result: str, rest: str, constants: dict[str, int], place: str
) -> Iterator[Step]:
    operands = _VALUE.findall(rest.partition(" : ")[0])
    is_narrow = bool(re.search(r"(?:^|x)i32\b", rest.rpartition(" : ")[2].strip()))
    divisor = constants.get(operands[-1]) if operands else None
    _, _, name = opcode.partition(".")
    if opcode == "tt.addptr":
        yield Step("address", result, operands[1:], place)
    elif opcode in ("tt.get_program_id", "tt.make_range", "tt.load") or "atomic" in name:
        yield Step("index", result)
    elif opcode in _SUMS:
        yield Step("sum", result, operands)
    elif name in ("muli", "shli"):
        kind = "product" if name == "muli" and is_narrow else "scaled"
        yield Step(kind, result, operands, place)
    elif "div" in name and name.endswith("i"):
        yield _divided(result, operands, divisor, place)
    elif name in ("shrsi", "shrui") and divisor is not None:
        yield _divided(result, operands, 1 << divisor, place)
    elif name in ("remsi", "remui"):
        yield Step("quotient", result, operands[:1])
    elif re.fullmatch(r"cmpi|(?:min|max)[su]i", name):
        yield Step("bound" if is_narrow else "wide bound", result, operands)
    else:
        yield Step("other", result, operands)


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

_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);")
_SOURCE = re.compile(r"%\w+(?:\.\w+)?|-?\b(?:0[xX][0-9a-fA-F]+|\d+)\b")
_OTHER_SPACES = {"shared", "local", "const", "param"}
_CARRIED = ("add", "sub", "mov", "cvt", "cvta", "selp", "or", "neg")
_INDICES = ("%tid", "%ctaid", "%laneid", "%warpid", "%clusterid", "%cluster_cta")


def _ptx_steps(text: str, symbol: str) -> Iterator[Step]:
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
                    yield Step("index", step.result)
                yield step


def _ptx_step(opcode: str, rest: str, symbol: str, place: str) -> Iterator[Step]:
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
        yield from (Step("argument" if is_own else "index", value) for value in results)
    elif "[" in rest and ("global" in spaces or not spaces & _OTHER_SPACES):
        yield Step("address", "", re.findall(r"\[\s*(%rd\w*)", rest), place)
        yield from (Step("index", value) for value in results)
    elif name == "mov" and operands[:1] and operands[0].startswith(_INDICES):
        yield Step("index", result)
    elif name in _CARRIED:
        kind = "sum32" if name in ("add", "sub") and is_narrow else "sum"
        yield from (Step(kind, value, operands) for value in results)
    elif name == "mul" and modifiers[0] in ("lo", "wide"):
        yield Step(product, result, operands)
    elif name == "mad" and modifiers[0] in ("lo", "wide"):
        yield Step(product, f"{result}'", operands[:2])
        yield Step("sum", result, (f"{result}'", operands[2]))
    elif name == "shl":
        yield Step("scaled", result, operands)
    elif name in ("div", "shr") or (name == "mul" and number is not None):  # mul.hi: by a constant
        divisor = 1 << number if name == "shr" and number is not None else number
        yield _divided(result, operands, MIN_TILE if name == "mul" else divisor, place)
    elif name == "rem":
        yield Step("quotient", result, operands[:1])
    elif name in ("setp", "min", "max"):
        is_wide = modifiers[-1] in ("s64", "u64", "b64")
        kind = "bound" if is_narrow else "wide bound" if is_wide else "other"
        yield from (Step(kind, value, operands) for value in results)
    else:
        yield from (Step("other", value, operands) for value in results)


def _number(text: str) -> int | None:
    return None if text.startswith("%") else int(text, 0)

"""Mutations of kernels: every way to break one line of them that a slip of the hand would take.

A mutation is one edit of the source text; the comments and everything else stay as they are.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# What a backward kernel calls the gradient it is given.
UPSTREAM = {"dy", "dout", "factor", "grad_loss"}
KERNEL = re.compile(r"^@jit|__global__", re.MULTILINE)
Change = tuple[int, int, str]  # from, to, new text


@dataclass(frozen=True)
class Mutant:
    """One edit of one file.

    Attributes:
        op: whose file it is.
        file: path below the root.
        function: where the edit is.
        line: its first line.
        kind: what slip it stands for.
        before: the lines as they are, in one.
        after: the lines as they become.
        changes: the edit in characters of the file.
        number: counts edits that read alike in one function.
    """

    op: str
    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    changes: tuple[Change, ...]
    number: int = 1

    @property
    def key(self) -> str:
        """What names the mutant for as long as its lines are not edited."""
        text = f"{self.file} {self.function}: {self.before} => {self.after}"
        return text if self.number == 1 else f"{text} #{self.number}"

    def apply(self, source: str) -> str:
        """Return the file's text with the edit."""
        for start, end, text in sorted(self.changes, reverse=True):
            source = source[:start] + text + source[end:]
        return source


def mutants_of(root: Path, op: str) -> list[Mutant]:
    """Return every mutant of an op's files (a folder or a file below `nearlight/ops`), in order.

    Among them are the kernels that the op shares with others (`nearlight/ops/_name.py`) and, where
    it has none of its own, those of core.
    """
    base = root / "nearlight" / "ops" / op
    files = sorted(base.rglob("*")) if base.is_dir() else [base.with_suffix(".py")]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".cu")]
    places = r"ops\._\w+" if any(map(KERNEL.search, texts)) else r"(?:core|ops)\.\w+"
    pattern = re.compile(rf"^from (nearlight\.{places}) import", re.MULTILINE)
    imported = dict.fromkeys(name for text in texts for name in pattern.findall(text))
    shared = (root / f"{name.replace('.', '/')}.py" for name in imported)
    files += [file for file in shared if file.exists() and KERNEL.search(file.read_text())]
    found: dict[str, Mutant] = {}
    for file in files:
        source = file.read_text(encoding="utf-8") if file.suffix in (".py", ".cu", ".cuh") else ""
        name = file.relative_to(root).as_posix()
        edits = python_edits(source) if file.suffix == ".py" else cuda_edits(source)
        for function, kind, changes in edits:
            mutant = _mutant(op, name, function, kind, changes, source)
            while mutant.key in found:
                mutant = replace(mutant, number=mutant.number + 1)
            found[mutant.key] = mutant
    return list(found.values())


def _mutant(
    op: str, file: str, function: str, kind: str, changes: list[Change], source: str
) -> Mutant:
    first, last = min(start for start, _, _ in changes), max(end for _, end, _ in changes)
    start, end = source.rfind("\n", 0, first) + 1, source.find("\n", last)
    inside = [(a - start, b - start, text) for a, b, text in changes]
    lines = source[start:end]
    bare = Mutant(op, file, function, source.count("\n", 0, first) + 1, kind, "", "", ())
    after = replace(bare, changes=tuple(inside)).apply(lines)
    before, after = (" ".join(text.split()) for text in (lines, after))
    return replace(bare, before=before, after=after, changes=tuple(changes))


def cuda_edits(source: str) -> Iterator[tuple[str, str, list[Change]]]:
    """Yield function, kind and changes of each mutation of CUDA C++ text."""
    rules = (
        ("barrier dropped", r"__sync(?:threads|warp)\([^()]*\);", r";"),
        ("int64 dropped", r"static_cast<(?:std::)?int64_t>\(([^()]*)\)", r"(\1)"),
        ("int64 dropped", r"\((?:std::)?int64_t\)\s*", r""),
        ("comparison moved", r"(\w) < (\w)", r"\1 <= \2"),
        ("mask term dropped", r"\((\w[^()&]*?) && [^()&]*?\)", r"(\1)"),
    )
    kernels = [(m.start(), m[1]) for m in re.finditer(r"__global__[^;{]*?(\w+)\s*\(", source)]
    for kind, pattern, by in rules:
        for match in re.finditer(pattern, source):
            function = next((name for at, name in reversed(kernels) if at < match.start()), "")
            # Beyond the barriers of a program nothing of a comment is a fault.
            if "//" not in source[source.rfind("\n", 0, match.start()) + 1 : match.start()]:
                yield function, kind, [(match.start(), match.end(), match.expand(by))]


def python_edits(source: str) -> Iterator[tuple[str, str, list[Change]]]:
    """Yield function, kind and changes of each mutation of a Python file's kernels and launchers.

    Edits that leave no Python are left out.
    """
    for node in ast.parse(source).body if source else ():
        if isinstance(node, ast.FunctionDef):
            is_kernel = any(ast.unparse(mark).startswith("jit") for mark in node.decorator_list)
            for kind, changes in _Function(source, node).edits(is_kernel):
                yield node.name, kind, changes


class _Function:
    """The edits of one function."""

    def __init__(self, source: str, node: ast.FunctionDef) -> None:
        self.source = source
        self.node = node
        lines = [0]
        for line in source.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        self.lines = lines
        self.byte_lines = source.encode().splitlines(keepends=True)
        arguments = node.args.args
        self.strides = [argument.arg for argument in arguments if "stride" in argument.arg]
        self.has_accumulator = any(argument.arg == "ACC" for argument in arguments)

    def at(self, line: int, column: int) -> int:
        # ast counts bytes; a comment may hold more than ASCII.
        return self.lines[line - 1] + len(self.byte_lines[line - 1][:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def put(self, node: ast.expr | ast.stmt, text: str) -> list[Change]:
        return [(*self.span(node), text)]

    def edits(self, is_kernel: bool) -> Iterator[tuple[str, list[Change]]]:
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call):
                yield from self._calls(node)
            if not is_kernel:
                yield from self._launcher(node)
            elif isinstance(node, ast.expr):
                yield from self._expression(node)
            elif isinstance(node, ast.stmt):
                yield from self._statement(node)

    def _launcher(self, node: ast.AST) -> Iterator[tuple[str, list[Change]]]:
        if isinstance(node, ast.keyword) and node.arg == "ACC":
            yield "accumulator in bf16", self.put(node.value, "triton.language.bfloat16")
        if isinstance(node, ast.Starred) and self.text(node) == "*upstream":
            yield "upstream skipped", self.put(node, "*map(torch.ones_like, upstream)")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if UPSTREAM & _names(node.right):
                yield "upstream skipped", self.put(node, self.text(node.left))

    def _calls(self, node: ast.Call) -> Iterator[tuple[str, list[Change]]]:
        name, given = ast.unparse(node.func), [self.text(argument) for argument in node.args]
        named = {keyword.arg: self.text(keyword.value) for keyword in node.keywords}
        if name in ("tl.cdiv", "triton.cdiv"):
            yield "cdiv off by one", self.put(node, f"(({given[0]}) // ({given[1]}))")
        elif name in ("tl.load", "tl.store"):
            num_given = 1 if name == "tl.load" else 2
            mask = named.get("mask", given[num_given] if len(given) > num_given else "")
            bare = f"{name}({', '.join(given[:num_given])}"
            if mask:
                yield "mask dropped", self.put(node, f"{bare})")
            if "other" in named:
                yield "other dropped", self.put(node, f"{bare}, {mask})")
        elif name == "tl.where":
            yield "where dropped", self.put(node, f"({given[1]})")
            yield "where dropped", self.put(node, f"({given[2]})")
        elif name in ("tl.maximum", "tl.minimum"):
            other = "tl.minimum" if name == "tl.maximum" else "tl.maximum"
            yield "maximum for minimum", self.put(node.func, other)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            if given == ["tl.int64"]:
                yield "int64 dropped", self.put(node, self.text(node.func.value))
            elif given == ["ACC"]:
                narrow = f"{self.text(node.func)}(tl.bfloat16).to(ACC)"
                yield "accumulator in bf16", self.put(node, narrow)

    def _expression(self, node: ast.expr) -> Iterator[tuple[str, list[Change]]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and not _is_switch(node):
            left, right = self.text(node.left), self.text(node.comparators[0])
            moved = {ast.Lt: "<=", ast.Gt: ">=", ast.GtE: ">", ast.LtE: "<"}
            if sign := moved.get(type(node.ops[0])):
                yield "comparison moved", self.put(node, f"{left} {sign} {right}")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if not isinstance(node.operand, ast.Constant):
                yield "sign changed", self.put(node, f"({self.text(node.operand)})")
        elif isinstance(node, ast.BinOp):
            yield from self._binary(node)
        elif isinstance(node, ast.Tuple):
            yield from self._strides(node)

    def _binary(self, node: ast.BinOp) -> Iterator[tuple[str, list[Change]]]:
        left, right = f"({self.text(node.left)})", f"({self.text(node.right)})"
        if isinstance(node.op, ast.BitAnd):
            yield "mask term dropped", self.put(node, left)
            yield "mask term dropped", self.put(node, right)
        elif isinstance(node.op, ast.FloorDiv) and re.search(r"- 1$", self.text(node.left)):
            rounded = ast.parse(self.text(node.left), mode="eval").body
            if isinstance(rounded, ast.BinOp) and isinstance(rounded.left, ast.BinOp):
                bare = ast.unparse(rounded.left.left)
                yield "cdiv off by one", self.put(node, f"({bare}) // {right}")
        elif any(name.endswith(("_ptr", "_at")) or name == "at" for name in _names(node)):
            return  # a pointer's terms are the strides' and the masks' business
        elif isinstance(node.op, ast.Add | ast.Sub):
            other = "-" if isinstance(node.op, ast.Add) else "+"
            yield "sign changed", self.put(node, f"{left} {other} {right}")
            yield "term dropped", self.put(node, left)
        elif isinstance(node.op, ast.Mult):
            yield "factor dropped", self.put(node, left)

    def _statement(self, node: ast.stmt) -> Iterator[tuple[str, list[Change]]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name == "tl.debug_barrier":
                yield "barrier dropped", self.put(node, "pass")
            elif name == "tl.store":
                yield "store dropped", self.put(node, "pass")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            target, value = self.text(node.target), self.text(node.value)
            sign, other = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield "sign changed", self.put(node, f"{target} {other}= {value}")
            yield "term dropped", self.put(node, f"{target} = {value}")
            if self.has_accumulator:
                narrow = f"{target} = ({target} {sign} ({value})).to(tl.bfloat16).to(ACC)"
                yield "accumulator in bf16", self.put(node, narrow)
        elif isinstance(node, ast.Assign):
            yield from self._strides(node.value)
            is_backward = re.search("bwd|_scale_", self.node.name)
            if is_backward and ast.unparse(node.targets[0]) in UPSTREAM:
                text = f"({self.text(node.value)}) * 0 + 1"
                yield "upstream skipped", self.put(node.value, text)

    def _strides(self, node: ast.expr) -> Iterator[tuple[str, list[Change]]]:
        """Swap neighbouring strides of an address; take another tensor's where there is one."""
        found = [part for part in ast.walk(node) if _is_stride(part)]
        found.sort(key=self.span)
        for one, next_one in itertools.pairwise(found):
            if self.text(one) != self.text(next_one):
                texts = self.text(next_one), self.text(one)
                swapped = [*self.put(one, texts[0]), *self.put(next_one, texts[1])]
                yield "strides swapped", swapped
        if len(found) == 1:
            others = [name for name in self.strides if name != self.text(found[0])]
            if others:
                yield "strides swapped", self.put(found[0], others[0])


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_stride(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id.endswith("strides")
    return isinstance(node, ast.Name) and "stride" in node.id and not node.id.endswith("strides")


def _is_switch(node: ast.Compare) -> bool:
    """Whether a compile-time option is compared: whether a part exists, not where it ends."""
    return isinstance(node.left, ast.Name) and node.left.id.isupper()

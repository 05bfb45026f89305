"""Rewrite a kernel's Python so that it computes what Triton's compiler would.

Assigned constants become tensors, `and`, `or` and `not` work element by element, a block in `if`
raises, a loop counter is an int32 that wraps. The function keeps its module's own globals; what it
needs besides comes through a closure, so that nothing is added to the module (Triton writes `np`,
`math`, … into it, which hides missing imports).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from nearlight.core.interpreter.arithmetic import encode
from nearlight.core.interpreter.reductions import make_tensor
from nearlight.core.interpreter.types import semantic

_rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}


def rewritten(function: JITFunction | InterpretedFunction) -> Callable[..., Any]:
    """Return a kernel's or helper's function rewritten, from the second time on a kept one.

    Raises:
        ValueError: it holds Python that Triton does not compile.
    """
    if function.fn not in _rewritten:
        is_jit = isinstance(function, JITFunction)
        _rewritten[function.fn] = _rewrite(function if is_jit else JITFunction(function.fn))
    return _rewritten[function.fn]


def callable_of(function: Any) -> Callable[..., Any]:
    """Return what to call for a helper or a combine function."""
    is_triton = isinstance(function, (JITFunction, InterpretedFunction))
    return rewritten(function) if is_triton else function


class _Rewriter(ast.NodeTransformer):
    """Give Python's assignments, conditions and logic the meaning they have when compiled."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call_of("__to_tensor", node.value)
        return node

    def _visit_test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = _call_of("__condition", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _visit_test  # noqa: N815  # names that ast calls

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        no_arguments = ast.arguments([], [], None, [], [], None, [])
        operands = [ast.Lambda(no_arguments, value) for value in node.values]
        name = "__and" if isinstance(node.op, ast.And) else "__or"
        return ast.copy_location(_call_of(name, *operands), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        is_not = isinstance(node.op, ast.Not)
        return ast.copy_location(_call_of("__not", node.operand), node) if is_not else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1:
            raise ValueError(
                f"`{ast.unparse(node)}`: Triton before 3.9 compiles no chained comparison; write "
                "(a < b) & (b < c)"
            )
        return node


def _call_of(function: str, *arguments: ast.expr) -> ast.expr:
    call = ast.Call(func=ast.Name(function, ast.Load()), args=list(arguments), keywords=[])
    return ast.copy_location(call, arguments[0])


def _condition(value: Any) -> Any:
    """Return a condition as it is; a block is none."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(
            f"a block of shape {list(value.handle.data.shape)} is no condition: use tl.where "
            "instead of if, or reduce it to a scalar"
        )
    return value


def _logic(is_and: bool, *operands: Callable[[], Any]) -> Any:
    """Evaluate `and` or `or`: constants cut short, tensors are combined element by element."""
    combine = semantic.logical_and if is_and else semantic.logical_or
    result: Any = None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            result = value if result is None else combine(result, value)
        elif bool(value) != is_and:
            return value
    return value if result is None else result


def _not(value: Any) -> Any:
    return semantic.not_(value) if isinstance(value, tl.tensor) else not value


def _rewrite(function: JITFunction) -> Callable[..., Any]:
    """Compile the rewritten source inside a factory whose arguments are the captured names."""
    source = textwrap.dedent("".join(function.raw_src))
    (definition,) = ast.parse(function.src).body
    assert isinstance(definition, ast.FunctionDef)
    definition.returns = None
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    definition = _Rewriter().visit(definition)
    line = function.starting_line_number + source[: source.index(function.src)].count("\n")
    ast.increment_lineno(definition, line - 1)
    captured = _captured(function)
    header = f"def __factory({', '.join(captured)}):\n    pass\n    return {definition.name}"
    tree = ast.parse(header)
    tree.body[0].body[0] = definition  # type: ignore[attr-defined]  # the header's own function
    ast.fix_missing_locations(tree)
    code = compile(tree, function.fn.__code__.co_filename, "exec", dont_inherit=True)
    namespace: dict[str, Any] = {}
    exec(code, function.fn.__globals__, namespace)
    made: Callable[..., Any] = namespace["__factory"](**captured)
    return made


def _captured(function: JITFunction) -> dict[str, Any]:
    """Return what the rewritten function needs beyond its globals."""
    module = function.fn.__globals__
    captured: dict[str, Any] = {
        "range": loop_range,
        "min": with_semantic(tl.core.builtin_min),
        "max": with_semantic(tl.core.builtin_max),
    }
    captured = {name: value for name, value in captured.items() if name not in module}
    # `from triton.language import exp` is out of reach of patching modules
    for name in function.fn.__code__.co_names:
        if tl.core.is_builtin(module.get(name)):
            captured[name] = with_semantic(module[name])
    captured.update(inspect.getclosurevars(function.fn).nonlocals)
    captured.update(
        __to_tensor=lambda value: semantic.to_tensor(value, False),
        __condition=_condition,
        __and=partial(_logic, True),
        __or=partial(_logic, False),
        __not=_not,
    )
    return captured


def with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of `tl`'s builtins with the argument that only the compiler gives it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


def as_int(value: Any) -> int:
    """Return a loop bound or an index as a Python integer."""
    if isinstance(value, tl.tensor):
        if not value.dtype.is_int():
            raise TypeError(f"a loop bound or index is {value.dtype}; allowed are integers")
        return int(value.handle.data.item())
    value = value.value if isinstance(value, tl.constexpr) else value
    return range(value).stop


def loop_range(start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> Iterator[tl.tensor]:
    """Count as a compiled loop does: the counter has the widest type of the bounds and wraps."""
    bounds = [value for value in (start, stop, step) if value is not None]
    is_wide = any(
        value.dtype.primitive_bitwidth == 64
        if isinstance(value, tl.tensor)
        else not -(2**31) <= as_int(value) < 2**31
        for value in bounds
    )
    first, last = (0, start) if stop is None else (start, stop)
    for i in range(as_int(first), as_int(last), as_int(step)):
        yield make_tensor(encode(np.array(i), tl.int64 if is_wide else tl.int32))


def static_range(start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> range:
    """Count with constants, as an unrolled loop does."""
    first, last = (0, start) if stop is None else (start, stop)
    return range(as_int(first), as_int(last), as_int(step))

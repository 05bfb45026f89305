"""Put our ops into a live model, and take them out again exactly.

Patching an instance changes its `__class__` to a subclass of the same name that overrides
`forward`; nothing is stored on the module, no parameter is touched, other instances of the class
are not affected, and undoing is setting `__class__` back.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nearlight.core import env
from nearlight.nn import linear_loss
from nearlight.nn.table import OPS, TABLE, TRANSFORMERS, Row, class_path


@dataclass(frozen=True)
class PatchedRow:
    """`count` instances of the class `module` run `op`."""

    module: str
    op: str
    count: int


@dataclass(frozen=True)
class SkippedRow:
    """`count` instances of the class `module` were left alone; `op` is "" if there is none yet."""

    module: str
    op: str
    count: int
    reason: str


@dataclass(frozen=True)
class Patched:
    """What stands patched in a model.

    Attributes:
        rows: classes that run our ops.
        skipped: classes that could not be patched, with the reason.
        reason: why there are no rows, else "".
    """

    rows: tuple[PatchedRow, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        lines = [f"{row.module}: {row.op} × {row.count}" for row in self.rows]
        lines += [f"{row.module}: left alone × {row.count}, {row.reason}" for row in self.skipped]
        return "\n".join(([self.reason] if self.reason else []) + lines)


def patch(model: nn.Module, only: Iterable[str] | None = None) -> Patched:
    """Put our ops into a live model of transformers (5.17 ≤ version < 6), instance by instance.

    Results stay the same up to rounding; `unpatch` undoes it exactly. Only exact classes of the
    table are patched, wherever they stand (also inside a PEFT wrapper); a subclass or an instance
    whose forward was replaced is left alone and listed. Patching again changes nothing more.
    Where an op does the work of another module (the head, an activation) and that module has a
    hook that would not see it, the op is not put in; a hook or another activation that comes after
    patching makes the plain computation run as long as it stands.
    With `linear_cross_entropy`, a forward with labels in training mode returns logits of width 0;
    without labels, or in eval mode, it returns the model's logits.

    Args:
        model: the live model, on any device, of any dtype.
        only: names of the ops to put in; None for all.

    Returns:
        What stands patched and what was left alone, by class. A model that no row fits, a version
        of transformers outside the range and NEARLIGHT=off give no rows and a reason.

    Raises:
        ValueError: `only` holds a name that is no op of the table, or the environment variable
            NEARLIGHT is neither "on" nor "off".
        TypeError: `model` is no module.

    Example:
        >>> from torch import nn
        >>> print(patch(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))))
        LayerNorm: layer_norm × 1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch takes a torch.nn.Module, not {type(model).__name__}")
    wanted = _wanted(only)
    if not env.read("NEARLIGHT"):
        return Patched(reason="NEARLIGHT=off: nothing was changed")
    version = _untried_transformers()
    patched: Counter[tuple[str, str]] = Counter()
    planned: list[tuple[nn.Module, type[nn.Module]]] = []
    skipped: Counter[tuple[str, str, str]] = Counter()
    for module in list(model.modules()):
        cls = _base(type(module))
        row, reason = _find(cls)
        if row is None or (row.op not in wanted and not (row.op == "" and only is None)):
            continue
        if version and cls.__module__.startswith("transformers."):
            reason = version
        reason = reason or _changed_instance(module) or row.why_not(module)
        reason = reason or _shared_head(module, row, planned)
        if reason:
            skipped[cls.__name__, row.op, reason] += 1
            continue
        planned += _plan(module, row)
        patched[cls.__name__, row.op] += 1
    for module, patched_class in planned:  # all classes are made: nothing fails half-way from here
        module.__class__ = patched_class
    return Patched(
        tuple(PatchedRow(*key, count) for key, count in patched.items()),
        tuple(SkippedRow(name, op, n, why) for (name, op, why), n in skipped.items()),
        "" if patched else f"no module of {type(model).__name__} can take {', '.join(wanted)}",
    )


def unpatch(model: nn.Module) -> None:
    """Take our ops out of a model; every module is again what it was before `patch`.

    Args:
        model: a model, patched or not; a deep copy of a patched model works too.

    Raises:
        RuntimeError: a patched module was given another class since (`fully_shard` and
            `parametrize` do so); nothing is changed then.
    """
    modules = list(model.modules())
    for module in modules:
        cls = type(module)
        if not is_patched(module) and hasattr(cls, "_nearlight_base"):
            raise RuntimeError(
                f"{cls.__name__} was made from a patched {cls._nearlight_base.__name__} after "
                "patching; undo that first, then unpatch"
            )
    foreign = _foreign_heads(modules)
    for module in modules:
        if id(module) not in foreign:
            module.__class__ = _base(type(module))


def is_patched(module: nn.Module) -> bool:
    """Return whether this very module runs one of our ops."""
    return _base(type(module)) is not type(module)


def _wanted(only: Iterable[str] | None) -> tuple[str, ...]:
    if only is None:
        return OPS
    names = (only,) if isinstance(only, str) else tuple(only)
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"only={unknown!r}: allowed are {', '.join(OPS)}")
    return names


def _untried_transformers() -> str:
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return ""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    low, high = TRANSFORMERS
    if low <= version < high:
        return ""
    return (
        f"transformers {transformers.__version__} is outside the range that was tried "
        f"({low[0]}.{low[1]} or later, before {high[0]})"
    )


def _find(cls: type) -> tuple[Row | None, str]:
    """Return the row of a class and why it must not be applied ("" if it may)."""
    row = TABLE.get(class_path(cls))
    if row is not None:
        return row, ""
    for ancestor in cls.__mro__[1:]:
        row = TABLE.get(class_path(ancestor))
        if row is not None:
            return row, f"subclass of {ancestor.__name__}: only exact classes are patched"
    return None, ""


def _changed_instance(module: nn.Module) -> str:
    if "forward" in module.__dict__:
        return "forward was replaced on this instance; patch before whatever replaces it"
    return ""


def _shared_head(module: Any, row: Row, planned: list[tuple[nn.Module, type[nn.Module]]]) -> str:
    if row.op != "linear_cross_entropy" or is_patched(module):
        return ""
    head = module.lm_head
    if is_patched(head) or any(other is head for other, _ in planned):
        return "lm_head is shared with another model that is patched; unpatch that one first"
    return ""


def _foreign_heads(modules: list[nn.Module]) -> set[int]:
    """Return ids of patched heads that belong to a model outside and are shared by one inside."""
    of_patched: set[int] = set()
    of_others: set[int] = set()
    for module in modules:
        head = module._modules.get("lm_head")
        if head is not None:
            (of_patched if is_patched(module) else of_others).add(id(head))
    return of_others - of_patched


def _plan(module: Any, row: Row) -> list[tuple[nn.Module, type[nn.Module]]]:
    plan = [(module, _patched_class(_base(type(module)), row.attributes))]
    if row.op == "linear_cross_entropy":
        head = module.lm_head
        plan.append((head, _patched_class(_base(type(head)), linear_loss.head_attributes)))
    return plan


def _base(cls: type) -> type:
    """Return the foreign class under a patched one, or the class itself."""
    return cls.__dict__.get("_nearlight_base", cls)


@functools.cache
def _patched_class(base: Any, attributes: Any) -> type[nn.Module]:
    """Make the patched subclass; name and module stay, since others go by them.

    transformers, accelerate and FSDP policies look classes up by name and read the source of
    their module, so pickling cannot find this class by name: it is rebuilt from its parts.
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = base.__reduce_ex__(self, protocol)
        return (_new_instance, (base, is_head), *reduced[2:])

    is_head = attributes is linear_loss.head_attributes
    members = {
        "_nearlight_base": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
    }
    return type(base.__name__, (base,), {**members, **attributes(base)})


def _new_instance(base: Any, is_head: bool) -> nn.Module:
    """Make an empty patched instance for copy and pickle, which then fill its state."""
    attributes = linear_loss.head_attributes if is_head else TABLE[class_path(base)].attributes
    cls = _patched_class(base, attributes)
    return cls.__new__(cls)

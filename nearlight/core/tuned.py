"""Tuned launches: rows that `nearlight tune` measured stand before an op's own rule.

A row serves exactly the arguments that it was measured for; the rule serves all others. Nothing is
searched here, and what was chosen once for some arguments is one look into a dict afterwards.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, update_wrapper
from pathlib import Path
from typing import Any

from nearlight.core import env
from nearlight.core.errors import BadInput
from nearlight.core.hardware import GPUS, Gpu
from nearlight.core.report import write_aside

SCHEMA = 1

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Choice:
    """How the launch of an op's kernels is chosen.

    Attributes:
        name: of the op; it names the file of the rows.
        rule: the pure function that chooses without a row.
        candidates: takes the rule's arguments; each configuration worth a try beside the rule's,
            with "" or the reason why it cannot run.
    """

    name: str
    rule: Callable[..., Any]
    candidates: Callable[..., Mapping[Any, str]]

    def choose(self, *args: Any, **named: Any) -> Any:
        """Return the configuration for the rule's arguments: forced, tuned, or the rule's."""
        ruled = self.rule(*args, **named)
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **named}
        rows = _rows(self.name, given["gpu"])
        if not rows and not _forced and _asked is None:
            return ruled
        asked = Asked(self, {name: given[name] for name in self._names})
        if _asked is not None and asked not in _asked:
            _asked.append(asked)
        if asked in _forced:
            return _forced[asked]
        row = rows.get(asked.key)
        return ruled if row is None or row["rule_is_best"] else self._tuned(asked, row, ruled)

    def _tuned(self, asked: Asked, row: Row, ruled: Any) -> Any:
        try:
            made = replace(ruled, **row["config"])
            if self.candidates(**asked.arguments).get(made) == "":
                return made
        except TypeError:  # a field that another version of the op had, or a list for a number
            pass
        warnings.warn(
            f"{self.name} {asked.key}: its tuned launch {row['config']} is none of this version's, "
            f"the rule's is taken; run `nearlight tune {self.name}` again",
            RuntimeWarning,
            stacklevel=3,
        )
        return ruled

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.rule).parameters)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.rule).parameters.items()
        return {name: each.default for name, each in parameters if each.default is not each.empty}


@dataclass(frozen=True)
class Asked:
    """A choice and the arguments, by name, that it was asked to choose for."""

    choice: Choice
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The rule and its arguments without the GPU ("config (16384, 4096) bfloat16")."""
        values = (value for name, value in self.arguments.items() if name != "gpu")
        texts = (str(value).removeprefix("torch.") for value in values)
        return " ".join((self.choice.rule.__name__, *texts))

    def __hash__(self) -> int:
        return hash((self.choice, *self.arguments.values()))


# Not context variables: autograd runs the backward of CUDA tensors in a thread of its own.
_forced: dict[Asked, Any] = {}
_asked: list[Asked] | None = None
_clears: list[Callable[[], object]] = []


def tunable(
    name: str, candidates: Callable[..., Mapping[Any, str]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a launch rule one that `nearlight tune` can search, and that takes its rows.

    Args:
        name: name of the op.
        candidates: takes the same arguments as the rule and returns every configuration worth a
            try beside the rule's, each with "" or the reason why it cannot run.

    Returns:
        A decorator. The rule is a pure function of hashable arguments, one of them `gpu` (None
        for the interpreter), to a frozen dataclass whose fields are numbers, strings or bools.

    Raises:
        TypeError: a rule without an argument `gpu`.

    Example:
        >>> def candidates(shape, dtype, gpu):
        ...     return {Config(block): "" for block in (512, 1024, 2048)}
        >>> @tunable("scale", candidates)
        ... def config(shape, dtype, gpu):
        ...     return Config(1024)
    """

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        if "gpu" not in inspect.signature(rule).parameters:
            raise TypeError(f"{name}: {rule.__name__} takes no `gpu`: rows belong to a GPU each")
        cached = lru_cache(maxsize=4096)(Choice(name, rule, candidates).choose)
        when_forgotten(cached.cache_clear)
        return update_wrapper(cached, rule)

    return decorate


@contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Note what the choices are asked for inside the block, each once."""
    global _asked
    before, _asked = _asked, []
    forget()
    try:
        yield _asked
    finally:
        _asked = before


@contextmanager
def forced(asked: Asked, config: Any) -> Iterator[None]:
    """Choose `config` for what was asked inside the block, whatever rows and rule say."""
    before = dict(_forced)
    _forced[asked] = config
    forget()
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        forget()


def user_path(name: str, gpu_key: str) -> Path:
    """Return where `nearlight tune` writes an op's rows for this user."""
    import platformdirs

    return Path(platformdirs.user_data_dir("nearlight")) / "tuned" / gpu_key / f"{name}.json"


def package_path(name: str, gpu_key: str) -> Path:
    """Return where an op's rows lie inside the package."""
    return Path(__file__).parents[1] / "data" / "tuned" / gpu_key / f"{name}.json"


def read(path: Path) -> dict[str, Row]:
    """Return the rows of a file by key, none where there is no file.

    Raises:
        BadInput: a file that cannot be used, with its path.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema is {content['schema']!r}, known is {SCHEMA}")
        rows = {row["key"]: row for row in content["rows"]}
        if not all(isinstance(row["config"], dict) and "rule_is_best" in row
                   for row in rows.values()):  # fmt: skip
            raise ValueError("a row lacks its config or whether the rule is best")
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{path}: {type(error).__name__}: {error}; run `nearlight tune {path.stem}` again or "
            "delete the file"
        ) from None
    return rows


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write rows beside those of other keys that a file has; rows of the same key are replaced."""
    merged = read(path) | {row["key"]: row for row in rows}
    content = {"schema": SCHEMA, "rows": list(merged.values())}
    write_aside(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    forget()
    _rows.cache_clear()


def forget() -> None:
    """Forget what was chosen, so that the next call of each op chooses anew."""
    for clear in _clears:
        clear()


def when_forgotten(clear: Callable[[], object]) -> None:
    """Call `clear` whenever choices are forgotten: it forgets what followed from them."""
    _clears.append(clear)


@lru_cache(maxsize=256)
def _rows(name: str, gpu: Gpu | None) -> Mapping[str, Row]:
    """Return an op's rows by key, the user's before the package's; read once in a process.

    A GPU that only borrows the numbers of the table, or a slice of one, has none. A file that
    cannot be used is said once, and the rule serves: a launch is no place to fail for it.
    """
    if gpu is None or gpu != GPUS.get(gpu.key) or not env.read("NEARLIGHT_TUNED"):
        return {}
    rows: dict[str, Row] = {}
    for path in (package_path(name, gpu.key), user_path(name, gpu.key)):
        try:
            rows |= read(path)
        except BadInput as error:
            warnings.warn(f"{error}; the rule's launches are taken", RuntimeWarning, stacklevel=4)
    return rows

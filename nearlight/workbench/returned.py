"""What a function returned, taken apart: tensors, and all else by its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Number, Real
from typing import Any

import torch

from nearlight.workbench.bad_source import BadSource

# By place ("", "[0]", "['loss']"): what is there; of a tensor, its class.
Form = Mapping[str, Any]

_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)


def parts_of(returned: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a function returned by its place; tuples and lists are alike, as are mappings.

    Raises:
        BadSource: a value that nothing can be compared to.
    """
    if isinstance(returned, torch.Tensor):
        yield place, returned
    elif isinstance(returned, (tuple, list)):
        for index, part in enumerate(returned):
            yield from parts_of(part, f"{place}[{index}]")
    elif isinstance(returned, Mapping):
        for key in sorted(returned, key=repr):  # in whatever order they were put in
            yield from parts_of(returned[key], f"{place}[{key!r}]")
    elif is_dataclass(returned) and not isinstance(returned, type):
        for field in fields(returned):
            yield from parts_of(getattr(returned, field.name), f"{place}.{field.name}")
    elif isinstance(returned, _PLAIN):
        yield place, returned
    else:
        raise BadSource(
            f"returned a {type(returned).__name__}{f' at {place}' if place else ''}; allowed are "
            "tensors, numbers, strings and None, in tuples, lists, dicts and dataclasses"
        )


def form_of(parts: Mapping[str, Any]) -> Form:
    """Return what stands at each place, tensors by their class alone."""
    return {
        place: torch.Tensor if isinstance(part, torch.Tensor) else part
        for place, part in parts.items()
    }


def differing(ours: Form, theirs: Form) -> str:
    """Say where a function returned another kind of thing than its reference, or return ""."""
    for place in dict.fromkeys([*theirs, *ours]):
        if place in ours and place in theirs:
            given, right = ours[place], theirs[place]
            if given is right or given == right or is_real(given, right):
                continue
        return f"output{place}: {_words(ours, place)}, the reference gives {_words(theirs, place)}"
    return ""


def is_real(*numbers: Any) -> bool:
    """Return whether numbers stand for real values, which round: they are held to the rule."""
    return all(isinstance(x, Real) for x in numbers) and any(isinstance(x, float) for x in numbers)


def _words(form: Form, place: str) -> str:
    if place not in form:
        return "nothing"
    return "a tensor" if form[place] is torch.Tensor else repr(form[place])[:60]

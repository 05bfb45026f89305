"""Layouts: the same values lying differently in memory.

What lies between the elements of a view is NaN (or another element's value for whole numbers), so
that a kernel that ignores a stride reads something wrong and not, by luck, the right value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MIN_DIMS = {"contiguous": 0, "transposed": 2, "transposed ends": 2}  # one for all others
FAMILIES = ("contiguous", "transposed", "sliced", "strided", "expanded", "offset")


def apply(layout: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape in the layout called `layout`.

    Args:
        layout: one of `names(tensor)`, e.g. "transposed" or "sliced [1:] dim 0".
        tensor: any shape, dtype and device; not changed.

    Returns:
        Equal values; except "expanded", which repeats the first entry of its dimension.

    Raises:
        ValueError: the layout is unknown, or the tensor has too few dimensions for it.
    """
    kind, _, dim_text = layout.partition(" dim ")
    if kind not in _MAKERS:
        raise ValueError(f"layout {layout!r}: allowed are {', '.join(names(tensor))}")
    dim = int(dim_text) if dim_text else 0
    if tensor.ndim < _MIN_DIMS.get(kind, 1) or not -tensor.ndim <= dim < max(tensor.ndim, 1):
        raise ValueError(f"layout {layout!r}: the tensor has {tensor.ndim} dimensions")
    return _MAKERS[kind](tensor.detach(), dim).requires_grad_(tensor.requires_grad)


def family(layout: str) -> str:
    """Return the family of a layout, the word an Op record uses to refuse it."""
    return layout.split(" ", 1)[0]


def names(tensor: torch.Tensor) -> list[str]:
    """Return every layout that differs for a tensor of this rank, contiguous first."""
    found = ["contiguous", "offset"] if tensor.ndim else ["contiguous"]
    if tensor.ndim >= 2:
        found.append("transposed")
    if tensor.ndim >= 3:
        found.append("transposed ends")
    for dim in range(tensor.ndim):
        found += [f"sliced [1:] dim {dim}", f"sliced [:-1] dim {dim}"]
        found += [f"strided [::2] dim {dim}", f"expanded dim {dim}"]
    if tensor.ndim >= 2:
        found.append("expanded all")
    return found


def one_of_each_family(tensor: torch.Tensor) -> list[str]:
    """Return one layout per family, on the last dimension where there is a choice."""
    chosen = {family(name): name for name in names(tensor) if name != "expanded all"}
    return list(chosen.values())


def _filled(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    filler = tensor.flatten()[-1].item() if tensor.numel() else 0
    return torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)


def _inside(tensor: torch.Tensor, dim: int, size: int, take: slice) -> torch.Tensor:
    """Put the tensor at `take` of a wider one along `dim` and return that view."""
    shape = list(tensor.shape)
    shape[dim] = size
    view = _filled(tensor, shape).movedim(dim, 0)[take].movedim(0, dim)
    return view.copy_(tensor)


def _contiguous(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _offset(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    storage = _filled(tensor, [tensor.numel() + 1])
    return storage[1:].view(tensor.shape).copy_(tensor)


def _transposed(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return _contiguous(tensor.transpose(-1, -2), dim).transpose(-1, -2)


def _transposed_ends(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return _contiguous(tensor.transpose(0, -1), dim).transpose(0, -1)


def _expanded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    first = _contiguous(tensor.narrow(dim, 0, min(1, tensor.shape[dim])), dim)
    return first.expand(tensor.shape)


def _expanded_all(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if not tensor.numel():
        return tensor.clone()
    return tensor.flatten()[:1].clone().view((1,) * tensor.ndim).expand(tensor.shape)


_MAKERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "transposed": _transposed,
    "transposed ends": _transposed_ends,
    "sliced [1:]": lambda t, d: _inside(t, d, t.shape[d] + 1, slice(1, None)),
    "sliced [:-1]": lambda t, d: _inside(t, d, t.shape[d] + 1, slice(None, -1)),
    "strided [::2]": lambda t, d: _inside(t, d, 2 * t.shape[d], slice(None, None, 2)),
    "expanded": _expanded,
    "expanded all": _expanded_all,
}

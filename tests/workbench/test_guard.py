"""Guard zones: allocations start as NaN, and one element outside is found."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import triton.language as tl

from nearlight.core.triton import jit
from nearlight.workbench.guard import Guard, guarded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def test_empty_tensors_start_as_nan_or_minus_one_and_others_as_asked():
    with guarded():
        x = torch.ones(3)
        assert torch.empty(2, 3).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).stride() == (1, 2)
        assert x.new_empty((4,), dtype=torch.bfloat16).isnan().all()
        assert torch.empty(2, dtype=torch.int64).tolist() == [-1, -1]
        assert torch.zeros(3).tolist() == [0, 0, 0]
        assert torch.full((2,), 7.0).tolist() == [7, 7]
        assert x.new_zeros(2).tolist() == [0, 0]
        assert torch.empty(3, requires_grad=True).requires_grad


@jit
def _copy_kernel(x_ptr, y_ptr, N, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + shift, at < N)
    tl.store(y_ptr + at, x, at < 5)


@pytest.mark.parametrize(
    ("num_read", "shift", "words"),
    [
        (5, 0, ""),
        (6, 0, "right past the end of x (5,)"),
        (5, 3, "right past the end of x (5,)"),
        (5, -2, "4 bytes before the start of x (5,)"),
    ],
)
def test_a_read_outside_is_found_though_its_value_is_dropped(num_read, shift, words):
    with guarded() as zones:
        x = zones.place(torch.arange(5.0), "x")
        y = torch.empty(5)
        _copy_kernel[(1,)](x, y, num_read, shift, BLOCK=8)
    assert zones.broken() == []
    assert zones.reads == ([words] if words else [])
    if not shift:
        assert y.tolist() == [0, 1, 2, 3, 4]
    _copy_kernel[(1,)](torch.zeros(8), torch.zeros(8), 8, 0, BLOCK=8)
    assert len(zones.reads) <= 1  # nothing is watched after the block


def test_allocations_by_a_name_of_an_own_file_are_guarded_too(tmp_path):
    file = tmp_path / "own_names.py"
    file.write_text(
        "import functools, torch\n"
        "from torch import empty as made, zeros\n"
        "like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)\n",
        encoding="utf-8",
    )
    spec = importlib.util.spec_from_file_location("nearlight_test_own_names", file)
    own = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(own)
        before = dict(vars(own))
        with guarded() as guard:
            x = own.made(3)
            assert x.isnan().all()
            like = own.like(own.zeros(4, 2).t())
            assert like.isnan().all() and like.stride() == (4, 1)
            x.as_strided((4,), (1,))[3] = 1.0
        (broken,) = guard.broken()
        assert broken.startswith("right past the end of a tensor of torch.empty (3,)")
        assert all(vars(own)[name] is value for name, value in before.items())
    finally:
        del sys.modules[spec.name]


def test_nothing_stays_patched_after_an_error():
    before = (torch.empty, torch.zeros, torch.Tensor.new_empty)
    with pytest.raises(KeyError), guarded():
        assert torch.empty is not before[0]
        raise KeyError
    assert (torch.empty, torch.zeros, torch.Tensor.new_empty) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("index", "words"), [(5, "past the end"), (-1, "before the start")])
def test_one_element_outside_is_found(dtype: torch.dtype, index: int, words: str):
    with guarded() as zones:
        x = torch.zeros(5, dtype=dtype)
        assert zones.broken() == []
        x.as_strided((1,), (1,), x.storage_offset() + index).fill_(1)
    (text,) = zones.broken()
    assert words in text
    line = test_one_element_outside_is_found.__code__.co_firstlineno
    tensor, found, place = text.partition(" (5,), allocated at test_guard.py:")
    assert tensor.endswith(" of a tensor of torch.zeros") and found
    number, name = place.split(" in ")
    assert line < int(number) < line + 9 and name == "test_one_element_outside_is_found"
    distance = 0 if index == 5 else x.element_size()
    # The first byte of a small number may be equal to the pattern's.
    found = int(text.split()[0]) if text[0].isdecimal() else 0  # "right past the end"
    assert distance <= found + (0 if index == 5 else 8) <= distance + 8


def test_writing_inside_breaks_nothing():
    with guarded() as zones:
        x = torch.empty(3, 5)
        x.fill_(1.0)
        torch.empty(0, 4)
    assert zones.broken() == []


def test_a_placed_tensor_keeps_values_strides_and_alignment():
    guard = Guard()
    x = torch.arange(12.0).view(3, 4).t()[1:]
    placed = guard.place(x, "x")
    assert torch.equal(placed, x)
    assert placed.stride() == x.stride()
    assert placed.data_ptr() % 64 == 0
    assert not placed._is_view()
    expanded = guard.place(torch.ones(1, 3).expand(4, 3), "e")
    assert expanded.stride() == (0, 1) and expanded.tolist() == [[1, 1, 1]] * 4

"""Every layout holds the same values, and lies where its name says."""

from __future__ import annotations

import pytest
import torch

from nearlight.workbench import layouts

STRIDES = {
    "contiguous": (12, 4, 1),
    "offset": (12, 4, 1),
    "transposed": (12, 1, 3),
    "transposed ends": (1, 2, 6),
    "sliced [1:] dim 1": (16, 4, 1),
    "sliced [:-1] dim 2": (15, 5, 1),
    "strided [::2] dim 2": (24, 8, 2),
    "strided [::2] dim 0": (24, 4, 1),
    "strided [::2] dim -1": (24, 8, 2),
    "expanded dim 1": (4, 0, 1),
    "expanded all": (0, 0, 0),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides(name: str):
    tensor = torch.arange(24.0).view(2, 3, 4)
    assert layouts.apply(name, tensor).stride() == STRIDES[name]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_values_shape_and_gradient_flag_are_kept(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    tensor.requires_grad_(dtype.is_floating_point)
    before = tensor.detach().clone()
    for name in layouts.names(tensor):
        laid = layouts.apply(name, tensor)
        assert laid.is_leaf and laid.requires_grad == tensor.requires_grad
        assert laid.shape == tensor.shape and laid.dtype == dtype
        if layouts.family(name) != "expanded":
            assert torch.equal(laid, tensor)
    assert torch.equal(tensor.detach(), before)


def test_what_lies_between_is_nan_or_another_label():
    sliced = layouts.apply("strided [::2] dim 0", torch.ones(3))
    assert torch.as_strided(sliced, (6,), (1,), 0).isnan().tolist() == [False, True] * 3
    labels = layouts.apply("strided [::2] dim 0", torch.tensor([4, 5, 6]))
    assert torch.as_strided(labels, (6,), (1,), 0).tolist() == [4, 6, 5, 6, 6, 6]


def test_an_odd_offset_is_misaligned():
    assert layouts.apply("offset", torch.ones(8, dtype=torch.bfloat16)).data_ptr() % 16 == 2


def test_one_of_each_family():
    chosen = layouts.one_of_each_family(torch.ones(2, 3))
    assert [layouts.family(name) for name in chosen] == [
        "contiguous",
        "offset",
        "transposed",
        "sliced",
        "strided",
        "expanded",
    ]
    assert set(layouts.FAMILIES) == {layouts.family(name) for name in chosen}


def test_unknown_and_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="allowed are contiguous, offset"):
        layouts.apply("diagonal", torch.ones(3))
    with pytest.raises(ValueError, match="the tensor has 1 dimensions"):
        layouts.apply("transposed", torch.ones(3))
    with pytest.raises(ValueError, match="the tensor has 1 dimensions"):
        layouts.apply("sliced [1:] dim 1", torch.ones(3))
    with pytest.raises(ValueError, match="the tensor has 0 dimensions"):
        layouts.apply("offset", torch.ones(()))

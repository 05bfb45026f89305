from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nearlight import ops
from nearlight.core.rows import MAX_WIDTH
from nearlight.nn import patch, table

VALUE = "outside"


def called() -> str:
    return VALUE


def decorate(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("wrapped", function(*args, **kwargs))

    return wrapper


@decorate
@decorate
def read_a_global(suffix: str = "!", *, times: int = 1) -> str:
    return (VALUE + suffix) * times


@pytest.mark.parametrize("path", sorted(table.TABLE))
def test_every_class_of_the_table_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert table.class_path(getattr(importlib.import_module(module), name)) == path


def test_every_op_of_the_table_is_exported() -> None:
    assert table.OPS == ("layer_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu")
    assert all(callable(getattr(ops, op)) for op in table.OPS)


def test_with_global_reaches_through_decorators() -> None:
    copied = table._with_global(read_a_global, "VALUE", "inside")
    assert copied(times=2) == ("wrapped", ("wrapped", "inside!inside!"))
    assert read_a_global() == ("wrapped", ("wrapped", "outside!"))
    assert copied.__wrapped__.__wrapped__.__code__ is read_a_global.__wrapped__.__wrapped__.__code__
    assert copied.__name__ == "read_a_global" and VALUE == "outside" and called() == "outside"


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_torchs_own_norms_over_one_dimension(kind: Any) -> None:
    model = nn.Sequential(kind(8, eps=1e-3), kind((3, 8), eps=1e-3))
    expected = model(torch.ones(2, 3, 8))
    patched = patch(model)
    assert [row.count for row in patched.rows] == [1]
    assert "2 dimensions" in patched.skipped[0].reason
    torch.testing.assert_close(model(torch.ones(2, 3, 8)), expected)


def test_a_norm_whose_eps_depends_on_the_dtype_is_left_alone() -> None:
    patched = patch(nn.RMSNorm(8))
    assert patched.rows == () and "eps=None" in patched.skipped[0].reason


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm])
def test_rows_wider_than_the_op_takes_are_left_alone(kind: Any) -> None:
    model = nn.ModuleList([kind(width, eps=1e-5) for width in (MAX_WIDTH, MAX_WIDTH + 1)])
    patched = patch(model)
    assert [row.count for row in patched.rows] == [1]
    assert patched.skipped[0].reason == "rows are 262145 wide; our op takes at most 262144"
    x = torch.randn(2, MAX_WIDTH + 1)
    assert torch.equal(model[1](x), kind(MAX_WIDTH + 1, eps=1e-5)(x))

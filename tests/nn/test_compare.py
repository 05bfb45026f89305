from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from nearlight.nn import compare_models


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [("first", nn.Linear(8, 8)), ("act", nn.Tanh()), ("second", nn.Linear(8, 3))]
    return nn.Sequential(OrderedDict(layers))


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(1))}


def test_a_copy_agrees(model: nn.Module, batch: Any) -> None:
    comparison = compare_models(model, copy.deepcopy(model), batch, loss)
    assert comparison.passed and comparison.first is None and comparison.not_compared == ()
    # four outputs, their gradients, four parameters
    assert len(comparison.rows) == 12
    assert str(comparison) == "the models agree in 12 tensors"


def test_nothing_stays_on_the_models(model: nn.Module, batch: Any) -> None:
    state = torch.get_rng_state()
    compare_models(model, model, batch, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_the_first_module_that_differs_is_named(model: nn.Module, batch: Any) -> None:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.second.bias[1] += 1e-3
    first = compare_models(model, changed, batch, loss).first
    assert first is not None and (first.module, first.quantity) == ("second", "output")
    assert first.judgement is not None and "largest error over its row's scale" in first.reason


def test_a_wrong_backward_alone_is_found_where_it_is(model: nn.Module, batch: Any) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    class WrongTanh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Wrong.apply(x)

    changed = copy.deepcopy(model)
    changed.act = WrongTanh()
    comparison = compare_models(model, changed, batch, loss)
    assert comparison.first is not None
    # the gradient that enters `act` is right; what leaves it and reaches `first` is not
    assert (comparison.first.module, comparison.first.quantity) == ("first", "output gradient")
    assert "first: output gradient differs first" in str(comparison)


class Adds(nn.Module):
    """Adds 1 and, in one element of a million, a little more."""

    def __init__(self, more: float) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + 1
        out[300, 7] += self.more
        return out


def test_a_row_within_luck_is_doubtful_and_one_beyond_differs() -> None:
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    doubtful = compare_models(Adds(0.0), Adds(3e-5), {"x": x})
    assert doubtful.passed and [row.module for row in doubtful.doubtful] == [""]
    assert str(doubtful).endswith("1 of them doubtful in single rows: compare another batch")
    differs = compare_models(Adds(0.0), Adds(3.2e-4), {"x": x}).first
    assert differs is not None and differs.judgement is not None and not differs.is_doubtful
    assert differs.judgement.shares.whole < 1  # the row alone says it


def test_another_shape_and_a_missing_module(model: nn.Module, batch: Any) -> None:
    changed = copy.deepcopy(model)
    changed.second = nn.Sequential(nn.Linear(8, 4))
    comparison = compare_models(model, changed, batch, loss)
    assert comparison.first is not None and comparison.first.module == "second"
    assert comparison.first.reason == "shape (5, 4) against (5, 3)"
    assert "second.weight gradient: only a has it" in comparison.not_compared
    assert "second.0 output: only b has it" in comparison.not_compared


def test_dropout_falls_on_the_same_places(batch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert compare_models(model, copy.deepcopy(model), batch, loss).passed


def test_without_a_loss_outputs_are_compared() -> None:
    model = nn.Linear(4, 4)
    comparison = compare_models(model, copy.deepcopy(model), {"input": torch.ones(2, 4)})
    assert [row.quantity for row in comparison.rows] == ["output"] and comparison.passed


def test_bf16_is_judged_by_its_own_rounding(model: nn.Module, batch: Any) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    changed = copy.deepcopy(half)
    inputs = {"x": batch["x"].to(torch.bfloat16)}
    with torch.no_grad():
        changed.first.weight += 2e-2
    assert compare_models(half, copy.deepcopy(half), inputs, loss).passed
    first = compare_models(half, changed, inputs, loss).first
    assert first is not None and first.module == "first"


def test_casts_to_fp32_stay_fp64_in_the_truth() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0 / 3.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() * self.weight.float() + 1e6

    model = Casts()
    comparison = compare_models(model, model, {"x": torch.ones(1)})
    row = comparison.rows[0]
    exact = model.weight.double().item() + 1e6
    rounded = torch.tensor(exact, dtype=torch.float32).double().item()
    assert row.judgement is not None and rounded != exact
    assert row.judgement.plain.whole == pytest.approx(abs(rounded - exact) / exact)

"""A fused op gives way to hooks that it would pass by, before and after patching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from transformers.models.llama import modeling_llama

from nearlight import ops
from nearlight.nn import patch
from nearlight.nn.hooks import hook_in_the_way

Batch = dict[str, torch.Tensor]
Make = Callable[..., Any]
Hook = Callable[[nn.Module], Any]

HOOKS: dict[str, Hook] = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    "backward": lambda m: m.register_full_backward_hook(lambda module, g, _: (3 * g[0],)),
    "backward-pre": lambda m: m.register_full_backward_pre_hook(lambda module, g: (3 * g[0],)),
    "forward-pre": lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
}
GLOBAL: dict[str, Hook] = {
    "global forward": lambda m: everywhere.register_module_forward_hook(
        lambda module, args, out: 2 * out if module is m else None
    ),
    "global backward": lambda m: everywhere.register_module_full_backward_hook(
        lambda module, g, _: (3 * g[0],) if module is m else None
    ),
    "global backward-pre": lambda m: everywhere.register_module_full_backward_pre_hook(
        lambda module, g: (3 * g[0],) if module is m else None
    ),
    "global forward-pre": lambda m: everywhere.register_module_forward_pre_hook(
        lambda module, args: (2 * args[0],) if module is m else None
    ),
}
PLACES = {
    "linear_cross_entropy": lambda model: model.lm_head,
    "swiglu": lambda model: model.model.layers[1].mlp.act_fn,
}


def step(model: Any, batch: Batch, op: str, register: Hook) -> list[torch.Tensor]:
    """Return loss and gradients with a hook in the place that the op would pass by."""
    handle = register(PLACES[op](model))
    try:
        loss = model(**batch).loss
        loss.backward()
    finally:
        handle.remove()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:For backward hooks")
@pytest.mark.parametrize("kind", [*HOOKS, *GLOBAL])
@pytest.mark.parametrize("op", PLACES)
def test_a_hook_after_patching_counts(op: str, kind: str, make_model: Make, batch: Batch) -> None:
    register = (HOOKS | GLOBAL)[kind]
    expected = step(make_model("Llama"), batch, op, register)
    model = make_model("Llama")
    patch(model, only=[op])
    with mock.patch.object(ops, op, mock.Mock(wraps=getattr(ops, op))) as spy:
        ours = step(model, batch, op, register)
    if op == "swiglu":  # the other layer stays fused, unless the hook is for all modules
        assert spy.call_count == (0 if kind in GLOBAL else 1)
    else:  # the head is still called: what comes before it needs no logits
        assert spy.call_count == (1 if "forward-pre" in kind else 0)
    torch.testing.assert_close(ours, expected)
    bare = step(make_model("Llama"), batch, op, lambda m: mock.Mock())
    assert any(not torch.allclose(a, b) for a, b in zip(expected, bare, strict=True))


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("op", PLACES)
def test_a_hook_before_patching_is_listed(op: str, kind: str, make_model: Make) -> None:
    model = make_model("Llama")
    HOOKS[kind](PLACES[op](model))
    patched = patch(model, only=[op])
    if (op, kind) == ("linear_cross_entropy", "forward-pre"):
        assert patched.skipped == () and patched.rows[0].count == 1
        return
    (row,) = patched.skipped
    assert row.count == 1 and f"has a {kind} hook" in row.reason
    assert sum(row.count for row in patched.rows) == (1 if op == "swiglu" else 0)


def test_once_the_hook_is_gone_the_op_runs_again(make_model: Make, batch: Batch) -> None:
    model = make_model("Llama")
    patch(model)
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert model(**batch).logits.shape[-1] == 97
    handle.remove()
    assert model(**batch).logits.shape[-1] == 0


def test_our_own_hooks_only_look() -> None:
    def hook(*_: Any) -> None: ...

    linear = nn.Linear(2, 2)
    linear.register_forward_hook(hook)
    assert hook_in_the_way(linear, is_called=True) == "forward"
    hook.__module__ = "nearlight.profiler.measure"
    assert hook_in_the_way(linear, is_called=True) == ""


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_another_activation_after_patching_counts(
    family: str, make_model: Make, batch: Batch
) -> None:
    name = {"Llama": "act_fn", "Phi3": "activation_fn"}[family]
    plain, model = make_model(family), make_model(family)
    patch(model)
    bare = plain(**batch).loss
    for each in (plain, model):
        setattr(each.model.layers[0].mlp, name, nn.ReLU())
        getattr(each.model.layers[1].mlp, name).forward = torch.tanh
    expected = plain(**batch).loss
    torch.testing.assert_close(model(**batch).loss, expected)
    assert abs(expected - bare) > 1e-4


def test_a_head_with_a_forward_of_its_own_after_patching_counts(
    make_model: Make, batch: Batch
) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    for each in (plain, model):
        found = each.lm_head.forward
        each.lm_head.forward = lambda x, found=found: 2 * found(x)
    expected = plain(**batch).loss
    torch.testing.assert_close(model(**batch).loss, expected)
    assert abs(expected - make_model("Llama")(**batch).loss) > 1e-3


def test_another_loss_type_after_patching_counts(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    bare = plain(**batch).loss
    for each in (plain, model):
        each.loss_type = "ForMaskedLM"  # which does not shift
    expected = plain(**batch).loss
    torch.testing.assert_close(model(**batch).loss, expected)
    assert abs(expected - bare) > 1e-4


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rope_replaced_in_transformers_counts(
    when: str, make_model: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = make_model("Llama"), make_model("Llama")

    def none(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    bare = plain(**batch).loss
    if when == "after":
        assert patch(model, only=["rope"]).rows[0].count == 2
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", none)
    if when == "before":
        assert "was replaced" in patch(model, only=["rope"]).skipped[0].reason
    expected = plain(**batch).loss
    assert abs(expected - bare) > 1e-4
    assert torch.equal(model(**batch).loss, expected)

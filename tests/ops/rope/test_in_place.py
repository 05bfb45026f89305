"""RoPE in place: the values and gradients of out of place, and a refusal of all else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nearlight.core.backend import force
from nearlight.core.cost import formula_for
from nearlight.ops import rope, rope_tables
from nearlight.ops.rope import OP, reference
from nearlight.ops.rope.in_place import _may_overlap_itself, _may_share_memory
from nearlight.workbench.check import check
from nearlight.workbench.launches import launches

BACKENDS = ["triton", "reference"]
# (B, S, H + HK + HK, D), as a packed projection writes it.
B, S, H, HK, D = 2, 5, 3, 1, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as views of a packed projection, (B, H, S, D)."""
    heads = packed.unflatten(-1, (-1, D)).transpose(1, 2)
    return heads[:, :H], heads[:, H : H + HK]


def packed(seed: int = 0) -> torch.Tensor:
    return random(B, S, (H + 2 * HK) * D, seed=seed)


TABLES = rope_tables(D, torch.arange(S))
OPTIONS: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "a part of the head": {"rotary_dim": 4},
    "positions": {"position_ids": torch.tensor([[0, 1, 0, 1, 2], [-1, 4, 3, 2, 1]])},
}


def given(name: str) -> dict[str, Any]:
    options = OPTIONS[name]
    cos, sin = rope_tables(options.get("rotary_dim", D), torch.arange(S))
    return {"cos": cos, "sin": sin, **options}


def on_copies(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    heads_dim: int = 1,
) -> Any:
    """`rope` in place on copies with the strides of q and k, so that `check` can prove it."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        # What overlaps is refused: it is proved as a clone, which lies side by side.
        if torch.compiler.is_compiling() or _may_overlap_itself(x):
            return x.clone()
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)

    return rope(
        copy(q),
        copy(k),
        cos,
        sin,
        position_ids=position_ids,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        heads_dim=heads_dim,
        in_place=True,
    )


def test_it_is_proved_like_any_op() -> None:
    names = ["values", "layouts", "lifecycle", "poison"]
    small = [case for case in OP.check_cases if case.shape["S"] < 1000]
    record = replace(OP, function=on_copies, check_cases=small, extremes=())
    report = check(record, quick=True, only=names)
    assert report.proof is not None and report.proof.passed, report.answer


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_q_and_k_are_written_where_they_lie(name: str, backend: str) -> None:
    whole = packed()
    q, k = parts(whole)
    expected = [x.clone() for x in rope(q, k, **given(name), backend=backend)]
    kept = whole.clone()
    with launches() as seen:
        turned = rope(q, k, **given(name), in_place=True, backend=backend)
    assert turned[0] is q and turned[1] is k
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    # The values beside them are as they were.
    assert torch.equal(whole[..., (H + HK) * D :], kept[..., (H + HK) * D :])
    assert len(seen) == (backend == "triton")


def trained(in_place: bool, backend: str, name: str) -> list[torch.Tensor]:
    """The loss of a projection whose q and k are views, its gradient and that of the gradient."""
    x, weight = random(B, S, 6, seed=1), random(6, (H + 2 * HK) * D, seed=2).requires_grad_()
    whole = x @ weight
    q, k = parts(whole)
    turned_q, turned_k = rope(q, k, **given(name), in_place=in_place, backend=backend)
    if not in_place:
        rest = whole[..., (H + HK) * D :]
        both = (y.transpose(1, 2).flatten(2) for y in (turned_q, turned_k))
        whole = torch.cat((*both, rest), dim=-1)
    loss = (turned_q.sin() * random(B, H, S, D, seed=3)).sum() + turned_k.pow(3).sum()
    loss = loss + (whole.cos() * random(*whole.shape, seed=4)).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.pow(2).sum(), weight)
    return [loss, gradient, second]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_flow_through_the_views_and_what_they_are_views_of(
    name: str, backend: str
) -> None:
    expected, found = (trained(in_place, backend, name) for in_place in (False, True))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("frozen", ["q", "k"])
def test_one_may_be_frozen(frozen: str) -> None:
    q, k = parts(packed())
    leaves = {"q": q.clone().requires_grad_(), "k": k.clone().requires_grad_()}
    leaves[frozen].requires_grad_(False)
    copies = {name: leaf.clone() for name, leaf in leaves.items()}
    outputs = rope(copies["q"], copies["k"], *TABLES, in_place=True, backend="triton")
    assert [x.requires_grad for x in outputs] == [frozen != "q", frozen != "k"]
    expected = rope(leaves["q"], leaves["k"], *TABLES, backend="triton")
    trainable = leaves["k" if frozen == "q" else "q"]
    found, wanted = (
        torch.autograd.grad(sum(y.pow(2).sum() for y in both), trainable)
        for both in (outputs, expected)
    )
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_sees_that_what_it_saved_is_gone(backend: str) -> None:
    x = random(B, H, S, D).requires_grad_()
    q, k = x.exp(), random(B, HK, S, D)
    before = q._version, k._version
    outputs = rope(q, k, *TABLES, in_place=True, backend=backend)
    assert q._version > before[0] and k._version > before[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_graph_anything_may_be_written(mode: Any, backend: str) -> None:
    weight = torch.nn.Parameter(random(B, H, S, D))
    expected = reference(weight.detach(), weight.detach(), *TABLES)[0]
    with mode():
        k = random(B, HK, S, D)
        rope(weight if mode is torch.no_grad else weight.clone(), k, *TABLES, in_place=True)
        again = random(B, H, S, D)
        for part in again.chunk(3, dim=1):  # parts of `chunk`, where no gradient is asked for
            rope(part, random(B, HK, S, D), *TABLES, in_place=True, backend=backend)
    torch.testing.assert_close(again, expected)
    if mode is torch.no_grad:
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_autograd_refuses_is_not_written(backend: str) -> None:
    heads = (random(B, H + HK, S, D).requires_grad_() * 1).split([H, HK], dim=1)
    kept = [part.detach().clone() for part in heads]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        rope(*heads, *TABLES, in_place=True, backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(heads, kept, strict=True))


LEAF = random(B, H, S, D).requires_grad_()
WHOLE = random(B, S, (H + HK) * D)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a leaf": ("q is a leaf that requires a gradient", {"q": LEAF}),
    "a view of a leaf": ("or a view of one", {"q": LEAF.transpose(0, 0)}),
    "expanded heads": (
        r"entries of q, strides \(40, 0, 8, 1\)",
        {"q": random(B, 1, S, D).expand(B, H, S, D)},
    ),
    "windows": ("k.contiguous", {"k": random(99).as_strided((B, HK, S, D), (40, 8, 4, 1))}),
    "twice the same": ("q shares memory with k", {"q": WHOLE.view(B, -1, S, D)[:, :1]}),
    "tables": ("q shares memory with sin", {}),
    "trained tables": (
        "cos or sin requires a gradient",
        {"cos": TABLES[0].clone().requires_grad_()},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals(name: str, backend: str) -> None:
    message, change = REFUSED[name]
    q, k = parts(packed())
    inputs = {"q": q, "k": k, "cos": TABLES[0], "sin": TABLES[1], **change}
    if name == "twice the same":
        inputs["k"] = inputs["q"]
    if name == "tables":
        inputs["q"] = q.contiguous()
        inputs["sin"] = inputs["q"][0, 0]
    before = {key: value.detach().clone() for key, value in inputs.items()}
    with pytest.raises(ValueError, match=message):
        rope(**inputs, in_place=True, backend=backend)
    assert all(torch.equal(inputs[key], value) for key, value in before.items())


def test_parts_of_one_projection_are_told_from_parts_that_overlap() -> None:
    whole = torch.zeros(3, 5, 6 * D)  # tokens one behind the other
    tokens = whole.unflatten(-1, (6, D)).transpose(1, 2)
    by_head = torch.zeros(3, 6, 5, 4 * D)  # as GPT-NeoX packs: q, k, v of a head side by side
    apart = [
        (tokens[:, :4], tokens[:, 4:5]),
        (tokens[:, 5:], tokens[:, :5]),
        (by_head[..., :D], by_head[..., D : 2 * D]),
        (by_head[:, :3], by_head[:, 3:]),
        (tokens[:2], tokens[2:]),
        (whole[..., ::2], whole[..., 1::2]),
        (tokens, torch.zeros(3, 5, 2)),
        (tokens[:, :0], tokens),
    ]
    together = [
        (tokens[:, :4], tokens[:, 3:]),
        (by_head[..., : D + 1], by_head[..., D : 2 * D]),
        (tokens[:2], tokens[1:]),
        (whole, whole[1:2, 2:3, 4:5]),
        (whole[..., ::2], whole[..., 2::2]),
        (whole, whole.view(torch.uint8)[..., 3:4]),
    ]
    for expected, pairs in ((False, apart), (True, together)):
        for one, other in pairs:
            assert _may_share_memory(one, other) is expected
            assert _may_share_memory(other, one) is expected
    for x in (tokens, by_head[..., :D], whole[..., ::2], torch.zeros(3).expand(0, 3), whole[:1]):
        assert not _may_overlap_itself(x)
    for x in (torch.zeros(3).expand(2, 3), torch.zeros(9).as_strided((3, 3), (2, 1))):
        assert _may_overlap_itself(x)


def test_opcheck() -> None:
    q, k = parts(packed())
    positions = OPTIONS["positions"]["position_ids"]
    for position_ids in (None, positions):
        args = (q.clone(), k.clone(), *TABLES, position_ids, False, D, 1)
        torch.library.opcheck(torch.ops.nearlight.rope_.default, args)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_compiled_without_a_graph_per_length(has_gradient: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rope(x * 2, k * 2, cos, sin, in_place=True)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for tokens in (3, 5, 6, 9):
        q, k = random(2, 3, tokens, D), random(2, 1, tokens, D, seed=1)
        tables = rope_tables(D, torch.arange(tokens))
        inputs = [q.requires_grad_(has_gradient), k.requires_grad_(has_gradient)]
        with force("triton"):
            found, expected = compiled(*inputs, *tables), step(*inputs, *tables)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
            if has_gradient:
                grads = [
                    torch.autograd.grad([y.pow(2).sum() for y in both], inputs)
                    for both in (found, expected)
                ]
                assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_on_inputs(backend: Any) -> None:
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    q, k = parts(packed())
    expected = rope(q, k, *TABLES, backend=backend)
    compiled(q, k, *TABLES, in_place=True, backend=backend)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


def test_cost_counts_what_turns_once_in_and_once_out() -> None:
    formula = formula_for("nearlight::rope_")
    q, k = torch.empty(2, 4, 3, 8, dtype=torch.bfloat16), torch.empty(2, 1, 3, 8).bfloat16()
    table = torch.empty(3, 4, dtype=torch.bfloat16)
    one = formula((q, k, table, table, None, False, 4, 1), {}, None)
    turned = 2 * 5 * 3 * 4 * 2  # half of each head
    assert (one.bytes_read, one.bytes_written) == (turned + 2 * 3 * 4 * 2, turned)


def test_empty() -> None:
    for shape in ((0, 3, 2, 4), (2, 3, 0, 4), (2, 0, 2, 4)):
        q, k = torch.zeros(shape), torch.zeros(shape[0], 1, shape[2], 4)
        tables = rope_tables(4, torch.arange(shape[2]))
        assert rope(q, k, *tables, in_place=True, backend="triton")[0] is q

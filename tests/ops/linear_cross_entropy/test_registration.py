from __future__ import annotations

import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from nearlight.core.cost import formula_for
from nearlight.ops.linear_cross_entropy import linear_cross_entropy, registration
from nearlight.ops.linear_cross_entropy.loop import Arguments

FWD = torch.ops.nearlight.linear_cross_entropy_fwd.default
BWD = torch.ops.nearlight.linear_cross_entropy_bwd.default


def inputs(rows: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator, dtype=dtype)
    weight = torch.randn(11, 6, generator=generator, dtype=dtype)
    labels = torch.randint(11, (rows,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), labels


def arguments(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **changes) -> Arguments:
    plain = Arguments(
        x, weight, labels, None, None, None, None, -100, 0.0, 0.0, None, 1.0, "mean", None,
        needs_x=True, needs_weight=True, needs_bias=False,
    )  # fmt: skip
    return plain._replace(**changes)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str):
    given = arguments(*inputs(), reduction=reduction)
    torch.library.opcheck(FWD, tuple(given))
    detached = given._replace(x=given.x.detach(), weight=given.weight.detach())
    torch.library.opcheck(BWD, (torch.ones(5), *detached))


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiles_once_for_all_row_counts(backend: str):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x, weight, labels):
        return 0.5 * linear_cross_entropy(2.0 * x, weight, labels, backend="triton")

    for rows in (5, 6, 7, 9):
        x, weight, labels = inputs(rows)
        loss = compiled(x, weight, labels)
        loss.backward()
        x_eager, weight_eager, _ = inputs(rows)
        eager = 0.5 * linear_cross_entropy(2.0 * x_eager, weight_eager, labels, backend="triton")
        eager.backward()
        assert torch.equal(loss, eager)
        assert torch.equal(x.grad, x_eager.grad)
        assert torch.equal(weight.grad, weight_eager.grad)
    assert counter.frame_count <= 2  # static, then dynamic


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_in_fp64(reduction: str):
    x, weight, labels = inputs(dtype=torch.float64)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    labels[1] = -100
    options = {
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 2.0,
        "logit_scale": 0.7,
        "class_weight": torch.rand(11, dtype=torch.float64),
        "token_weight": torch.randn(5, dtype=torch.float64),
        "reduction": reduction,
    }
    torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, labels, b, backend="triton", **options),
        (x, weight, bias),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_raises(reduction: str):
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels, reduction=reduction, backend="triton")
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        BWD(torch.ones(5), *arguments(x, weight, labels))[0].sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_gives_the_same(reduction: str):
    x, weight, labels = inputs()
    loss = 0.5 * linear_cross_entropy(x, weight, labels, reduction=reduction, backend="triton")
    loss = loss.sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, (x, weight))
    for gradient, same, again in zip(first, kept, second, strict=True):
        assert gradient.equal(same)
        assert again.equal(same)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoint_gives_the_same(reduction: str):
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, labels, reduction=reduction, backend="triton").sum()

    x, weight, labels = inputs()
    plain = torch.autograd.grad(loss(x, weight), (x, weight))
    checkpointed = checkpoint(loss, x, weight, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(checkpointed, (x, weight)), plain, strict=True):
        assert one.equal(other)


def test_gradients_are_handed_over_not_copied(monkeypatch: pytest.MonkeyPatch):
    scaled = []
    scale_ = registration.scale_
    monkeypatch.setattr(
        registration, "scale_", lambda t, f: (scaled.append(t.data_ptr()), scale_(t, f))
    )
    x, weight, labels = inputs()
    linear_cross_entropy(x, weight, labels, backend="triton").backward()
    assert [x.grad.data_ptr(), weight.grad.data_ptr()] == scaled


def test_inputs_are_not_kept_for_a_scalar_loss():
    x, weight, labels = inputs()
    hidden = x * 2
    storage = weakref.ref(hidden)
    loss = linear_cross_entropy(hidden, weight, labels, backend="triton")
    del hidden
    assert storage() is None
    loss.backward()
    assert x.grad is not None


@pytest.mark.parametrize("needs", [(False, True), (True, False), (False, False)])
def test_products_only_for_the_gradients_needed(
    needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
):
    calls = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (calls.append(1), mm(*a, **k))[1])
    x, weight, labels = inputs()
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    linear_cross_entropy(x, weight, labels, backend="triton")
    assert len(calls) == 1 + sum(needs)
    calls.clear()
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, backend="triton")
    assert len(calls) == 1


@pytest.mark.parametrize(("needs", "products"), [((True, True), 3), ((False, False), 1)])
def test_cost_counts_products_bytes_and_the_workspace(needs: tuple[bool, bool], products: int):
    with torch.device("meta"):
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
        weight = torch.empty(128_256, 4096, dtype=torch.bfloat16)
        labels = torch.empty(8192, dtype=torch.int64)
    given = arguments(x, weight, labels, needs_x=needs[0], needs_weight=needs[1])
    cost = formula_for("nearlight::linear_cross_entropy_fwd")(tuple(given), {}, None)
    assert cost.flops == {"bf16": products * 2 * 8192 * 4096 * 128_256}
    matrices = (8192 + 128_256) * 4096 * 2
    assert cost.bytes_read == matrices + 8192 * 8
    assert cost.bytes_written == (matrices if all(needs) else 0)
    assert 0 < cost.workspace_bytes - 2048 * 128_256 * 2 <= 8192 * 64
    assert cost.pattern == "matmul"

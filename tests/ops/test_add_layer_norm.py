import pytest
import torch
import torch.nn.functional as F

from nearlight.core import backend
from nearlight.ops import add_layer_norm, layer_norm


def make(rows=6, width=33, dtype=torch.bfloat16, wide=None):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(rows, width, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator) for _ in range(2))
    dtypes = (dtype, wide or dtype, dtype, dtype)
    made = zip((x, residual, weight, bias), dtypes, strict=True)
    return tuple(tensor.to(kind).requires_grad_() for tensor, kind in made)


@pytest.mark.parametrize("wide", [None, torch.float32])
def test_the_sum_is_rounded_as_it_is_stored_and_normalised_as_that(wide):
    x, residual, weight, bias = make(wide=wide)
    with backend.force("triton"):
        y, total = add_layer_norm(x, residual, weight, bias)
        assert torch.equal(total, residual + x) and total.dtype == (wide or x.dtype)
        assert y.dtype == x.dtype
        assert torch.equal(y, layer_norm(total, weight, bias).to(x.dtype))


@pytest.mark.parametrize("used", ["y", "total", "both"])
@pytest.mark.parametrize("wide", [None, torch.float32])
def test_gradients_of_either_output_alone_and_of_both(used, wide):
    tensors = make(dtype=torch.float32 if wide is None else torch.bfloat16, wide=wide)
    results = []
    for name in ("triton", "reference"):
        y, total = add_layer_norm(*tensors, backend=name)
        losses = {"y": y.float().square().sum(), "total": total.square().sum()}
        loss = sum(losses.values()) if used == "both" else losses[used]
        wanted = tensors[:2] if used == "total" else tensors
        results.append(torch.autograd.grad(loss, wanted))
    allowed = 1e-2 if wide else 1e-5
    for ours, right in zip(*results, strict=True):
        assert ours.dtype == right.dtype
        assert (ours - right).float().norm() <= allowed * right.float().norm()


@pytest.mark.parametrize("needed", [{0}, {1}, {0, 3}, {2}, {1, 2, 3}])
def test_only_the_gradients_that_are_asked_for(needed):
    results = []
    for name in ("triton", "reference"):
        tensors = [
            tensor.detach().requires_grad_(index in needed)
            for index, tensor in enumerate(make(wide=torch.float32))
        ]
        y, total = add_layer_norm(*tensors, backend=name)
        (y.float().square().sum() + total.sum()).backward()
        results.append([tensor.grad for tensor in tensors])
    for index, (ours, right) in enumerate(zip(*results, strict=True)):
        assert (ours is None) == (right is None) == (index not in needed)
        if ours is not None:
            assert ours.dtype == right.dtype
            assert (ours - right).float().norm() <= 1e-2 * right.float().norm()


@pytest.mark.parametrize("width", [257, 20_000])
def test_the_variance_survives_a_large_mean_in_the_stream(width):
    generator = torch.Generator().manual_seed(0)
    x = 0.01 * torch.randn(2, width, generator=generator)
    residual = torch.full_like(x, 30.0)
    y, total = add_layer_norm(x, residual, backend="triton")
    right = F.layer_norm(total.double(), (width,))
    assert (y - right).abs().max() <= 1e-3


def test_a_residual_that_does_not_fit_is_refused():
    x, residual, *_ = make()
    with pytest.raises(TypeError, match="add_layer_norm: residual is torch.float64 and x"):
        add_layer_norm(x, residual.double())
    with pytest.raises(ValueError, match=r"residual has shape \(1, 33\)"):
        add_layer_norm(x, residual[:1])


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_batch_and_an_only_row(rows):
    tensors = make(rows=rows)
    with backend.force("triton"):
        y, total = add_layer_norm(*tensors)
        gradients = torch.autograd.grad((y.sum(), total.sum()), tensors)
    assert y.shape == total.shape == tensors[0].shape
    assert [g.shape for g in gradients] == [tensor.shape for tensor in tensors]
    assert rows or not any(g.any() for g in gradients)

import pytest
import torch

from nearlight.core import backend
from nearlight.ops import add_rms_norm, rms_norm


def make(rows=6, width=33, dtype=torch.bfloat16, wide=None):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(rows, width, generator=generator) for _ in range(2))
    weight = torch.randn(width, generator=generator)
    dtypes = (dtype, wide or dtype, dtype)
    made = zip((x, residual, weight), dtypes, strict=True)
    return tuple(tensor.to(kind).requires_grad_() for tensor, kind in made)


@pytest.mark.parametrize("wide", [None, torch.float32])
def test_the_sum_is_rounded_as_it_is_stored_and_normalised_as_that(wide):
    x, residual, weight = make(wide=wide)
    with backend.force("triton"):
        y, total = add_rms_norm(x, residual, weight)
        assert torch.equal(total, residual + x) and total.dtype == (wide or x.dtype)
        assert y.dtype == x.dtype
        if wide is None:
            assert torch.equal(y, rms_norm(total, weight))


@pytest.mark.parametrize("used", ["y", "total", "both"])
@pytest.mark.parametrize("wide", [None, torch.float32])
def test_gradients_of_either_output_alone_and_of_both(used, wide):
    x, residual, weight = make(dtype=torch.float32 if wide is None else torch.bfloat16, wide=wide)
    results = []
    for name in ("triton", "reference"):
        y, total = add_rms_norm(x, residual, weight, backend=name)
        losses = {"y": 3.0 * y.float().sum(), "total": total.square().sum()}
        loss = sum(losses.values()) if used == "both" else losses[used]
        wanted = (x, residual) if used == "total" else (x, residual, weight)
        results.append(torch.autograd.grad(loss, wanted))
    allowed = 1e-2 if wide else 1e-5
    for ours, right in zip(*results, strict=True):
        assert ours.dtype == right.dtype
        assert (ours - right).float().norm() <= allowed * right.float().norm()


def test_a_wide_residual_keeps_what_a_narrow_one_loses():
    x, residual, _ = make(wide=torch.float32)
    small, large = torch.full_like(x, 2.0**-9), residual.detach().round() + 4
    with backend.force("triton"):
        assert torch.equal(add_rms_norm(small, large)[1] - large, small.float())
        assert torch.equal(add_rms_norm(small, large.to(x.dtype))[1], large.to(x.dtype))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x, r: (x, r.double()), TypeError, "residual is torch.float64 and x torch.bfloat16"),
        (lambda x, r: (x.float(), r), TypeError, "residual is torch.bfloat16 and x torch.float32"),
        (lambda x, r: (x, r[:1]), ValueError, r"residual has shape \(1, 33\)"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(change, error, words):
    x, residual, _ = make()
    with pytest.raises(error, match=words):
        add_rms_norm(*change(x, residual))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_batch_and_an_only_row(rows):
    x, residual, weight = make(rows=rows)
    with backend.force("triton"):
        y, total = add_rms_norm(x, residual, weight)
        gradients = torch.autograd.grad((y.sum(), total.sum()), (x, residual, weight))
    assert y.shape == total.shape == x.shape
    assert [g.shape for g in gradients] == [x.shape, x.shape, weight.shape]
    assert rows or not gradients[2].any()

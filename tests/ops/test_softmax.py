"""Softmax and its logarithm: one file, for they share all but a name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from nearlight.core.cost import formula_for
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.core.numerics import judge
from nearlight.core.triton import compile_for
from nearlight.ops import OPS, log_softmax, softmax

FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
names = pytest.mark.parametrize("name", FUNCTIONS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(name, x, **options):
    return FUNCTIONS[name](x, backend="triton", **options)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 129), (2, 20_000)])
def test_is_torchs(name, shape, dtype):
    x = (3 * random(*shape, dtype=dtype)).requires_grad_()
    dy = random(*shape, dtype=dtype, seed=1)
    y = ours(name, x)
    found = y, *torch.autograd.grad(y, x, dy)

    def torchs(dtype):
        wide = x.detach().to(dtype).requires_grad_()
        y = getattr(F, name)(wide, dim=-1)
        return y, *torch.autograd.grad(y, wide, dy.to(dtype))

    for actual, plain, truth in zip(found, torchs(dtype), torchs(torch.float64), strict=True):
        assert actual.dtype == plain.dtype
        judgement = judge(actual, plain, truth)
        assert judgement.passed, judgement.reason


MASKS = {
    "whole": (2, 3, 4, 33),
    "one per row of the last": (33,),
    "padding": (2, 1, 1, 33),
    "causal": (4, 33),
    "per head": (3, 1, 33),
    "per query": (2, 3, 4, 1),
    "alternating": (2, 1, 4, 33),
    "one": (1,),
}


@names
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_that_broadcast(assert_right, name, kind, shape):
    keep = random(*shape, seed=2) > -0.5
    bias = random(*shape, seed=3).masked_fill(~keep, -torch.inf)
    mask = keep if kind == "bool" else bias
    assert_right(OPS[name], random(2, 3, 4, 33).requires_grad_(), mask=mask, scale=0.5)


@names
def test_a_mask_of_strides_that_no_three_dimensions_hold(assert_right, name):
    mask = (random(5, 2, 3, 2, 7, seed=2) > 0).permute(3, 1, 2, 0, 4)[:, :, ::2]
    x = random(2, 2, 2, 5, 7).requires_grad_()
    assert_right(OPS[name], x, mask=mask)
    assert_right(OPS[name], x.detach().requires_grad_(), mask=mask[:, :1, :, :1, ::1])


@names
@pytest.mark.parametrize("width", [33, 20_000])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_that_are_masked_whole(name, width, kind):
    x = random(3, width)
    keep = torch.ones(3, width, dtype=torch.bool)
    keep[1] = False
    keep[2, ::2] = False
    mask = keep if kind == "bool" else torch.zeros(3, width).masked_fill(~keep, -torch.inf)
    x.requires_grad_()
    y = ours(name, x, mask=mask)
    (dx,) = torch.autograd.grad(y.masked_fill(y == -torch.inf, 0).square().sum(), x)
    assert torch.equal(y[1], torch.full((width,), -torch.inf if name == "log_softmax" else 0.0))
    assert not dx[1].any() and not dx[2, ::2].any() and bool(dx.isfinite().all())
    torch.testing.assert_close(y[0], getattr(F, name)(x[0], dim=-1))


@names
def test_rows_of_minus_infinity_without_a_mask_are_torchs(name):
    x = torch.tensor([[-torch.inf] * 3, [1.0, -torch.inf, 2.0]]).requires_grad_()
    dy = random(2, 3, seed=1)
    plain = getattr(F, name)(x, dim=-1)
    y = ours(name, x)
    torch.testing.assert_close(y, plain, equal_nan=True)
    gradients = (torch.autograd.grad(each, x, dy)[0] for each in (y, plain))
    torch.testing.assert_close(*gradients, equal_nan=True)


@names
def test_what_a_mask_takes_out_may_be_nan_and_other_nan_stays(name):
    x = random(3, 40)
    x[0, 3] = x[1, 3] = torch.nan
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[0, 3] = False
    y = ours(name, x, mask=mask)
    assert y[0].isnan().sum() == 0 and y[1].isnan().all() and not y[2].isnan().any()


@names
@pytest.mark.parametrize("width", [4100, 40_001])
def test_tiles_of_a_gpu(assert_right, name, width):
    x = torch.linspace(-4, 4, width).sin().repeat(2, 1) * 9
    x[1] = x[1].flip(0)
    with launched_as_on(find_gpu("h200")):
        assert_right(OPS[name], x.requires_grad_(), mask=torch.arange(width) % 5 > 0)


LAYOUTS = {
    "transposed": lambda: random(10, 6).t(),
    "middle": lambda: random(3, 6, 2, 10)[:, :, 1],
    "sliced": lambda: random(6, 12)[:, 1:-1],
    "every other": lambda: random(6, 20)[:, ::2],
    "expanded": lambda: random(1, 10).expand(6, 10),
    "odd offset": lambda: random(61)[1:].view(6, 10),
}


@names
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, name, layout):
    odd = LAYOUTS[layout]()
    assert_right(OPS[name], odd, upstream=random(*odd.shape, seed=1))
    assert_right(OPS[name], random(*odd.shape), upstream=odd)


@names
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)])
def test_empty(name, shape):
    x = torch.empty(shape, requires_grad=True)
    y = ours(name, x, mask=torch.ones(shape[-1], dtype=torch.bool))
    y.sum().backward()
    assert y.shape == shape == x.grad.shape


@names
def test_backward_twice_and_an_output_written_before_it(name):
    x, dy = random(4, 8).requires_grad_(), random(4, 8, seed=1)
    y = ours(name, x * 1)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    y.data.sub_(0)  # unseen by autograd, and no change
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, dy)


def test_a_confident_row_keeps_the_digits_of_its_gradient():
    # 1 − p of the first is 2e-7: of its gradient the difference 1 − Σ p leaves no digit.
    x = torch.tensor([[16.0, 0.0, 0.5]])
    for width in (3, 20_000):
        leaf = F.pad(x, (0, width - 3), value=-torch.inf).requires_grad_()
        dy = F.pad(torch.tensor([[1.0, 2.0, -3.0]]), (0, width - 3))
        (dx,) = torch.autograd.grad(ours("softmax", leaf), leaf, dy)
        truth = leaf.detach().double().requires_grad_()
        (right,) = torch.autograd.grad(truth.softmax(-1), truth, dy.double())
        torch.testing.assert_close(dx.double(), right, rtol=1e-6, atol=0)
        (zero,) = torch.autograd.grad(ours("softmax", leaf), leaf, torch.ones_like(dy))
        assert zero.abs().max() < 1e-13


@names
def test_double_backward_raises(name):
    x = random(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(name, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


@names
def test_gradcheck(name):
    x = random(2, 5).double().requires_grad_()
    mask = random(5, seed=1).double()
    assert torch.autograd.gradcheck(lambda x: ours(name, x, mask=mask, scale=-0.7), x)


@names
def test_compiled_without_a_graph_per_row_count(name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True)
    for rows in (3, 5, 6, 9):
        x, mask = random(rows, 8).requires_grad_(), random(1, 8) > 0
        y = compiled(x, mask=mask, backend="triton")
        y.sum().backward()
        assert torch.equal(y, ours(name, x, mask=mask))
    assert counter.frame_count <= 2


@names
def test_refusals(name):
    x = random(2, 4)
    for options, kind, reason in (
        ({"mask": torch.ones(3)}, ValueError, "must broadcast"),
        ({"mask": torch.ones(1, 2, 4)}, ValueError, "must broadcast"),
        ({"mask": torch.ones(4).requires_grad_()}, ValueError, "gets no gradient"),
        ({"mask": torch.ones(4).long()}, TypeError, "or bool"),
    ):
        with pytest.raises(kind, match=reason):
            ours(name, x, **options)
    with pytest.raises(TypeError, match="allowed are fp16"):
        ours(name, x.long())
    with pytest.raises(ValueError, match=r"\(..., N\)"):
        ours(name, torch.tensor(1.0))


@names
def test_costs_count_each_tensor_once_and_a_mask_by_what_it_holds(name):
    x, mask = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(1, 8, dtype=torch.bool)
    forward = formula_for(f"nearlight::{name}_fwd")((x, mask, 1.0), {}, x)
    assert (forward.bytes_read, forward.bytes_written) == (6 * 8 * 2 + 8, 6 * 8 * 2)
    # Five passes, as the targets count them.
    total = OPS[name].cost(OPS[name].cases[0])["forward_backward"]
    assert total.bytes == 5 * 16384 * 4096 * 2 and total.num_kernels == 2


@names
def test_contiguous_tensors_move_in_16_byte_vectors(name):
    for build in OPS[name].builds("sm_90a"):
        if "mask_ptr" not in build.signature:
            ptx = compile_for(build, "sm_90a").ptx
            for line in ptx.splitlines():
                if "ld.global" in line or "st.global" in line:
                    assert ".v4.b32" in line, line

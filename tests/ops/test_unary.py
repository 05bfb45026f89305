"""What holds of every activation that stands alone, as a public op."""

import pytest
import torch
import torch.nn.functional as F

from nearlight.core.triton import compile_for
from nearlight.ops import OPS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMS = {
    "silu": ("silu", {}),
    "gelu": ("gelu", {}),
    "gelu, tanh": ("gelu", {"approximate": "tanh"}),
    "relu2": ("relu2", {}),
}
PLAIN = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=FORMS)
def form(request):
    """The record of an op, and its options."""
    name, options = FORMS[request.param]
    return OPS[name], options


@pytest.fixture
def ours(form):
    op, options = form
    return lambda x: op.function(x, **options, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (5, 129), (2, 3, 130)])
def test_values(assert_right, form, shape, dtype):
    assert_right(form[0], random(*shape, dtype=dtype) * 3, **form[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale, mean", [(1e-3, 0), (100, 0), (0.1, -20), (0.1, 12), (0.5, -4)])
def test_values_that_are_not_flat(assert_right, form, dtype, scale, mean):
    if form[0].name == "relu2":
        scale = min(scale, 50)  # its square must fit into fp16
    assert_right(form[0], (random(6, 65) * scale + mean).to(dtype), **form[1])


LAYOUTS = {
    "transposed": lambda: random(6, 4, 10).transpose(0, 1),
    "reversed": lambda: random(10, 6, 4).permute(2, 1, 0),
    "sliced": lambda: random(4, 7, 12)[:, 1:, 1:-1],
    "every other": lambda: random(4, 6, 20)[..., ::2],
    "one number": lambda: random(1).expand(4, 6, 10),
    "odd offset": lambda: random(241)[1:].view(4, 6, 10),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, form, layout):
    odd, plain = LAYOUTS[layout](), random(4, 6, 10, seed=3)
    assert_right(form[0], odd, upstream=plain, **form[1])
    assert_right(form[0], plain, upstream=odd, **form[1])


def test_order_of_memory_is_kept(ours):
    x = random(6, 4, 10).transpose(0, 1)
    assert ours(x).stride() == x.stride()


def test_scalar_and_empty(ours):
    assert ours(torch.tensor(2.0)).shape == ()
    for shape in ((0,), (3, 0, 4)):
        x = torch.empty(shape, requires_grad=True)
        ours(x).sum().backward()
        assert x.grad.shape == shape


def test_backward_twice_gives_the_same_and_the_input_stays(ours):
    x, dout = random(4, 8).requires_grad_(), random(4, 8, seed=2)
    before, out = x.detach().clone(), ours(x)
    (first,) = torch.autograd.grad(out, x, dout, retain_graph=True)
    (second,) = torch.autograd.grad(out, x, dout)
    assert torch.equal(first, second) and torch.equal(x, before)
    assert x._version == dout._version == 0


def test_double_backward_raises(ours):
    x = random(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


def test_gradcheck(ours):
    x = random(2, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(ours, (x,), fast_mode=True)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_opcheck(name):
    forward = getattr(torch.ops.nearlight, f"{name}_fwd").default
    torch.library.opcheck(forward, (random(4, 3).T.requires_grad_(),))


def test_refusals(form):
    op, options = form
    with pytest.raises(TypeError, match=r"x is torch.int64; allowed"):
        op.function(torch.ones(2, dtype=torch.int64), **options)
    with pytest.raises(ValueError, match="backend='cuda'"):
        op.function(random(2), **options, backend="cuda")


def test_auto_is_plain_pytorch_on_the_cpu(form):
    op, options = form
    x = random(3, 4)
    assert torch.equal(op.function(x, **options), PLAIN[op.name](x, **options))


@pytest.mark.parametrize("direction, num_loads, num_stores", [("fwd", 2, 2), ("bwd", 4, 2)])
def test_contiguous_tensors_move_in_16_byte_vectors(form, direction, num_loads, num_stores):
    op, options = form
    name = "gelu_tanh" if options else op.name
    build = next(
        build
        for build in op.builds("sm_90a")
        if direction in build.kernel.fn.__name__ and build.constants["ACTIVATION"] == name
    )
    ptx = compile_for(build, "sm_90a").ptx
    assert ptx.count("ld.global.v4.b32 ") == num_loads == ptx.count("ld.global.")
    assert ptx.count("st.global.v4.b32 ") == num_stores == ptx.count("st.global.")


def test_limit_counts_five_passes(form):
    total = form[0].cost(form[0].cases[0])["forward_backward"]
    assert total.bytes == 5 * 16384 * 14336 * 2 and total.num_kernels == 2

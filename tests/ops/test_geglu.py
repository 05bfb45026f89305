import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP

from nearlight.core.numerics import judge
from nearlight.core.triton import compile_for
from nearlight.ops.geglu import OP, geglu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMS = ["none", "tanh"]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(gate, up=None, approximate="none"):
    return geglu(gate, up, approximate, backend="triton")


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (5, 129)])
def test_two_inputs_and_packed(assert_right, rows, width, dtype, approximate):
    gate = random(rows, width, dtype=dtype) * 3
    assert_right(OP, gate, random(rows, width, dtype=dtype, seed=1), approximate=approximate)
    assert_right(OP, random(rows, 2 * width, dtype=dtype) * 3, approximate=approximate)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale, mean", [(1e-3, 0), (1e3, 0), (0.1, -20), (0.1, 12), (0.5, -4)])
def test_values_that_are_not_flat(assert_right, dtype, scale, mean, approximate):
    gate = (random(6, 65) * scale + mean).to(dtype)
    assert_right(OP, gate, random(6, 65, dtype=dtype, seed=1), approximate=approximate)


LAYOUTS = {
    "transposed rows": lambda: random(6, 4, 10).transpose(0, 1),
    "reversed": lambda: random(10, 6, 4).permute(2, 1, 0),
    "every other": lambda: random(4, 6, 20)[..., ::2],
    "expanded columns": lambda: random(4, 6, 1).expand(4, 6, 10),
    "odd offset": lambda: random(241)[1:].view(4, 6, 10),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, layout):
    odd, plain = LAYOUTS[layout](), random(4, 6, 10, seed=3)
    assert_right(OP, odd, plain, upstream=plain)
    assert_right(OP, plain, odd, upstream=odd)
    assert_right(OP, odd, approximate="tanh", upstream=random(6, 4, 5).transpose(0, 1))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty(shape):
    gate = torch.empty(shape, requires_grad=True)
    out = ours(gate, torch.empty(shape))
    out.sum().backward()
    assert out.shape == shape == gate.grad.shape
    assert ours(torch.empty(0, 8), approximate="tanh").shape == (0, 4)


def test_backward_twice_gives_the_same_and_inputs_stay():
    gate, up = random(4, 8).requires_grad_(), random(4, 8, seed=1).requires_grad_()
    before = gate.detach().clone(), up.detach().clone()
    out, dout = ours(gate, up), random(4, 8, seed=2)
    first = torch.autograd.grad(out, [gate, up], dout, retain_graph=True)
    second = torch.autograd.grad(out, [gate, up], dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    assert gate._version == up._version == dout._version == 0


def test_outputs_that_a_producer_saved_are_not_overwritten(assert_right):
    # exp saves its own output, which is our input.
    def of_exponentials(function):
        return lambda gate, up: function(gate.exp(), up.exp())

    assert_right(OP, random(4, 8), random(4, 8, seed=1), through=of_exponentials)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_double_backward_raises(is_packed, approximate):
    gate = random(2, 4).requires_grad_()
    out = ours(gate, None if is_packed else gate, approximate)
    (gradient,) = torch.autograd.grad(out.sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


@pytest.mark.parametrize("approximate", FORMS)
def test_gradcheck(approximate):
    gate, up = (random(2, 3, seed=seed).double().requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(lambda *x: ours(*x, approximate), (gate, up), fast_mode=True)


def test_opcheck():
    gate, up = random(3, 4).requires_grad_(), random(4, 3).T.requires_grad_()
    ops = torch.ops.nearlight
    torch.library.opcheck(ops.geglu_fwd.default, (gate, up))
    torch.library.opcheck(ops.geglu_tanh_packed_fwd.default, (up,))


def test_compiled_without_a_graph_per_row_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for rows in (3, 5, 6, 9):
        gate, up = random(rows, 8).requires_grad_(), random(rows, 8, seed=1)
        out = compiled(gate, up, "tanh")
        out.sum().backward()
        eager = ours(gate, up, "tanh")
        assert torch.equal(out, eager)
        assert torch.equal(gate.grad, torch.autograd.grad(eager.sum(), gate)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlp_of_gemma(dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "hidden_activation": "gelu_pytorch_tanh"}
    mlp = GemmaMLP(GemmaConfig(**sizes)).to(dtype)
    x, dout = random(2, 5, 24, dtype=dtype), random(2, 5, 24, dtype=dtype, seed=1)

    def with_ours(x):
        return mlp.down_proj(ours(mlp.gate_proj(x), mlp.up_proj(x), "tanh"))

    def run_model(function, x, dout):
        x = x.detach().clone().requires_grad_()
        out = function(x)
        return out, *torch.autograd.grad(out, [x, *mlp.parameters()], dout)

    actual, plain = run_model(with_ours, x, dout), run_model(mlp, x, dout)
    mlp.double()  # it casts nothing to fp32
    truth = run_model(mlp, x.double(), dout.double())
    for one, two, three in zip(actual, plain, truth, strict=True):
        judgement = judge(one, two, three)
        assert judgement.passed, judgement.reason


def test_refusals():
    x = random(2, 4)
    with pytest.raises(TypeError, match=r"torch.int64; allowed"):
        geglu(x.long(), x.long())
    with pytest.raises(TypeError, match="convert one"):
        geglu(x, x.bfloat16())
    with pytest.raises(ValueError, match="must agree"):
        geglu(x, x[:1])
    with pytest.raises(ValueError, match="must be even"):
        geglu(x[:, :3])
    with pytest.raises(ValueError, match="approximate='sigmoid'; allowed are 'none'"):
        geglu(x, x, "sigmoid")


def test_auto_is_plain_pytorch_on_the_cpu():
    x = random(3, 4)
    assert torch.equal(geglu(x, x), F.gelu(x) * x)
    assert torch.equal(geglu(x, approximate="tanh"), reference(x, approximate="tanh"))


@pytest.mark.parametrize("direction, num_loads, num_stores", [("fwd", 4, 2), ("bwd", 6, 4)])
def test_contiguous_tensors_move_in_16_byte_vectors(direction, num_loads, num_stores):
    build = next(build for build in OP.builds("sm_90a") if direction in build.kernel.fn.__name__)
    ptx = compile_for(build, "sm_90a").ptx
    assert ptx.count("ld.global.v4.b32 ") == num_loads == ptx.count("ld.global.")
    assert ptx.count("st.global.v4.b32 ") == num_stores == ptx.count("st.global.")


def test_limit_counts_eight_passes():
    total = OP.cost(OP.cases[0])["forward_backward"]
    assert total.bytes == 8 * 16384 * 14336 * 2 and total.num_kernels == 2

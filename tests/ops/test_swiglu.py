import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from nearlight.core.builds import check_budget
from nearlight.core.cost import formula_for
from nearlight.core.numerics import judge
from nearlight.core.triton import compile_for
from nearlight.ops.swiglu import OP, reference, swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(gate, up=None):
    return swiglu(gate, up, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 7), (5, 129), (2, 1000)])
def test_two_inputs(assert_right, rows, width, dtype):
    assert_right(OP, random(rows, width, dtype=dtype) * 3, random(rows, width, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (4, 6), (2, 3, 130)])
def test_packed(assert_right, shape, dtype):
    assert_right(OP, random(*shape, dtype=dtype) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale, mean", [(1e-3, 0), (1e3, 0), (0.1, -20), (0.1, 12), (1, -60)])
def test_values_that_are_not_flat(assert_right, dtype, scale, mean):
    gate = (random(6, 65) * scale + mean).to(dtype)
    assert_right(OP, gate, random(6, 65, dtype=dtype, seed=1) * 1e3)


def test_infinities_and_nan_are_those_of_torch():
    gate = torch.tensor([float("inf"), -float("inf"), float("nan"), -1e38, 1e38])
    plain = reference(gate, torch.ones(5))
    torch.testing.assert_close(ours(gate, torch.ones(5)), plain, equal_nan=True, rtol=0, atol=0)


def test_where_exp_ends(assert_right):
    assert_right(OP, torch.tensor([[104.0], [-104.0], [89.0], [-89.0]]), torch.ones(4, 1))


LAYOUTS = {
    "transposed rows": lambda: random(6, 4, 10).transpose(0, 1),
    "transposed columns": lambda: random(4, 10, 6).transpose(1, 2),
    "reversed": lambda: random(10, 6, 4).permute(2, 1, 0),
    "sliced rows": lambda: random(4, 7, 10)[:, 1:],
    "sliced columns": lambda: random(4, 6, 12)[..., 1:-1],
    "every other": lambda: random(4, 6, 20)[..., ::2],
    "expanded rows": lambda: random(1, 1, 10).expand(4, 6, 10),
    "expanded columns": lambda: random(4, 6, 1).expand(4, 6, 10),
    "one number": lambda: random(1).expand(4, 6, 10),
    "odd offset": lambda: random(241)[1:].view(4, 6, 10),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["gate", "up", "upstream", "all"])
def test_layouts(assert_right, layout, which):
    odd, plain = LAYOUTS[layout](), random(4, 6, 10, seed=3)
    gate, up, dout = (
        odd if which in (name, "all") else plain for name in ("gate", "up", "upstream")
    )
    assert_right(OP, gate, up, upstream=dout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_layouts(assert_right, layout):
    assert_right(OP, LAYOUTS[layout](), upstream=random(6, 4, 5).transpose(0, 1))


def test_chunks_of_one_projection_are_read_in_place(assert_right):
    gate, up = random(3, 5, 16).chunk(2, dim=-1)
    assert_right(OP, gate, up)


def test_dims_that_do_not_merge_are_copied_right(assert_right):
    # Four orders of memory: no two dimensions merge.
    gate = random(2, 3, 4, 5)
    up = random(5, 4, 3, 2, seed=1).permute(3, 2, 1, 0)
    dout = random(3, 2, 5, 4, seed=2).permute(1, 0, 3, 2)
    assert_right(OP, gate, up, upstream=dout)
    assert_right(
        OP, random(5, 4, 3, 6).permute(2, 0, 1, 3), upstream=random(5, 3, 4, 3).permute(1, 0, 2, 3)
    )


def test_order_of_memory_is_kept():
    gate = random(6, 4, 10).transpose(0, 1)
    assert ours(gate, random(4, 6, 10)).stride() == gate.stride()
    assert ours(random(3, 4, 2, 8)[:, :, 0]).is_contiguous()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
def test_empty(shape):
    gate = torch.empty(shape, requires_grad=True)
    out = ours(gate, torch.empty(shape))
    out.sum().backward()
    assert out.shape == shape == gate.grad.shape
    assert ours(torch.empty(0, 8)).shape == (0, 4)


def test_backward_twice_gives_the_same_and_inputs_stay():
    gate, up = random(4, 8).requires_grad_(), random(4, 8, seed=1).requires_grad_()
    before = gate.detach().clone(), up.detach().clone()
    out, dout = ours(gate, up), random(4, 8, seed=2)
    kept = dout.clone()
    first = torch.autograd.grad(out, [gate, up], dout, retain_graph=True)
    second = torch.autograd.grad(out, [gate, up], dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1]) and torch.equal(dout, kept)
    assert gate._version == up._version == dout._version == 0


def test_outputs_that_a_producer_saved_are_not_overwritten(assert_right):
    # exp saves its own output, which is our input.
    def of_exponentials(function):
        return lambda gate, up: function(gate.exp(), up.exp())

    assert_right(OP, random(4, 8), random(4, 8, seed=1), through=of_exponentials)


def test_input_changed_before_backward_raises():
    gate, up = random(4, 8).requires_grad_() * 1, random(4, 8)
    out = ours(gate, up)
    up.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_frozen_input_gets_no_gradient(frozen):
    gate, up = random(3, 5).requires_grad_(), random(3, 5, seed=1).requires_grad_()
    leaves = {"gate": gate, "up": up}
    both = torch.autograd.grad(ours(gate, up).sum(), (gate, up))
    leaves[frozen] = leaves[frozen].detach()
    ours(**leaves).sum().backward()
    for leaf, expected in zip(leaves.values(), both, strict=True):
        assert torch.equal(leaf.grad, expected) if leaf.requires_grad else leaf.grad is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_double_backward_raises(is_packed):
    gate = random(2, 4).requires_grad_()
    out = ours(gate) if is_packed else ours(gate, gate)
    (gradient,) = torch.autograd.grad(out.sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


def test_gradcheck():
    gate, up = (
        random(2, 3).double().requires_grad_(),
        random(2, 3, seed=1).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(ours, (gate, up), fast_mode=True)
    assert torch.autograd.gradcheck(ours, (random(2, 4).double().requires_grad_(),), fast_mode=True)


def test_opcheck():
    gate, up = random(3, 4).requires_grad_(), random(4, 3).T.requires_grad_()
    ops = torch.ops.nearlight
    torch.library.opcheck(ops.swiglu_fwd.default, (gate, up))
    torch.library.opcheck(ops.swiglu_packed_fwd.default, (up,))
    with torch.no_grad():
        torch.library.opcheck(ops.swiglu_bwd.default, (random(3, 4), gate, up))
        torch.library.opcheck(ops.swiglu_packed_bwd.default, (random(3, 2), gate))


def test_compiled_without_a_graph_per_row_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for rows in (3, 5, 6, 9):
        gate, up = random(rows, 8).requires_grad_(), random(rows, 8, seed=1)
        out = compiled(gate, up)
        out.sum().backward()
        eager = ours(gate, up)
        assert torch.equal(out, eager)
        assert torch.equal(gate.grad, torch.autograd.grad(eager.sum(), gate)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_mlp_of_transformers(kind, dtype):
    sizes = {"hidden_size": 24, "intermediate_size": 40}
    torch.manual_seed(0)
    mlp = (
        LlamaMLP(LlamaConfig(**sizes, num_attention_heads=4))
        if kind == "llama"
        else Phi3MLP(Phi3Config(**sizes))
    )
    mlp = mlp.to(dtype)
    x, dout = random(2, 5, 24, dtype=dtype), random(2, 5, 24, dtype=dtype, seed=1)

    def with_ours(x):
        if kind == "llama":
            return mlp.down_proj(ours(mlp.gate_proj(x), mlp.up_proj(x)))
        return mlp.down_proj(ours(mlp.gate_up_proj(x)))

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


PAST_INT32 = """
import torch
from nearlight.ops.swiglu import swiglu
# 4 GiB that nobody touches but where the rows lie: the last row starts at element 2**31.
storage = torch.empty(2**31 + 32, dtype=torch.bfloat16)
gate, up = storage.as_strided((3, 8), (2**30, 1)), storage.as_strided((3, 8), (2**30, 1), 8)
packed = storage.as_strided((3, 16), (2**30, 1))
packed.copy_(torch.randn(3, 16))
dout = storage.as_strided((3, 8), (2**30, 1), 16).copy_(torch.randn(3, 8))
for inputs in ((gate, up), (packed,)):
    results = []
    for tensors in (inputs, [x.clone() for x in inputs]):  # the copies' rows lie side by side
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = swiglu(*leaves, backend="triton")
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
print("right")
"""


def test_offsets_past_int32():
    # In a process of its own: an int32 offset would crash it.
    done = subprocess.run([sys.executable, "-c", PAST_INT32], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_refusals():
    x = random(2, 4)
    with pytest.raises(TypeError, match="torch.int64; allowed"):
        swiglu(x.long(), x.long())
    with pytest.raises(TypeError, match="convert one"):
        swiglu(x, x.bfloat16())
    with pytest.raises(ValueError, match="must agree"):
        swiglu(x, x[:1])
    with pytest.raises(ValueError, match="must agree"):
        swiglu(x, x.to("meta"))
    for packed in (x[:, :3], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="must be even"):
            swiglu(packed)
    with pytest.raises(ValueError, match="backend='cuda'"):
        swiglu(x, x, backend="cuda")


def test_dtensor_is_refused():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(random(2, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="DTensor"):
            ours(x, x)
    finally:
        dist.destroy_process_group()


def test_auto_is_plain_pytorch_on_the_cpu():
    x = random(3, 4)
    assert torch.equal(swiglu(x, x), F.silu(x) * x)


def test_cost_counts_each_tensor_once():
    gate, expanded = torch.empty(6, 4, dtype=torch.bfloat16), torch.empty(4).expand(6, 4)
    forward = formula_for("nearlight::swiglu_fwd")((gate, expanded), {}, gate)
    assert (forward.bytes_read, forward.bytes_written) == (6 * 4 * 2 + 4 * 4, 6 * 4 * 2)
    packed = torch.empty(6, 8, dtype=torch.bfloat16)
    backward = formula_for("nearlight::swiglu_packed_bwd")((gate, packed), {}, packed)
    assert (backward.bytes_read, backward.bytes_written) == (3 * 48, 2 * 48)
    # Eight passes over 16384 x 14336 bf16, as the targets count them.
    total = OP.cost(OP.cases[0])["forward_backward"]
    assert total.bytes == 8 * 16384 * 14336 * 2 and total.num_kernels == 2


@pytest.mark.parametrize("direction, num_loads, num_stores", [("fwd", 4, 2), ("bwd", 6, 4)])
def test_contiguous_tensors_move_in_16_byte_vectors(direction, num_loads, num_stores):
    build = next(build for build in OP.builds("sm_90a") if direction in build.kernel.fn.__name__)
    ptx = compile_for(build, "sm_90a").ptx
    assert ptx.count("ld.global.v4.b32 ") == num_loads == ptx.count("ld.global.")
    assert ptx.count("st.global.v4.b32 ") == num_stores == ptx.count("st.global.")


def test_peers_take_the_inputs_of_the_cases():
    case = OP.check_cases[0]
    inputs = OP.make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert OP.peers["torch"]()(**inputs).shape == (case.shape["rows"], case.shape["N"])


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from nearlight.core.builds import check_budget
from nearlight.core.cost import formula_for
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.core.triton import compile_for
from nearlight.ops.group_norm import OP, group_norm, reference
from nearlight.ops.group_norm.kernels import Config, candidates, config

H200 = find_gpu("h200")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def inputs(*shape: int, dtype: torch.dtype = torch.float32):
    weight, bias = 1 + random(shape[1], seed=1), random(shape[1], seed=2)
    return random(*shape, dtype=dtype), weight.to(dtype), bias.to(dtype)


def ours(x, num_groups, weight=None, bias=None, **options):
    return group_norm(x, num_groups, weight, bias, backend="triton", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (1, 1, 5), (2, 6, 35), (2, 6, 5, 7), (2, 4, 3, 2, 9)])
@pytest.mark.parametrize("num_groups", [1, 2, "channels"])
@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
def test_shapes_groups_and_orders(assert_right, shape, num_groups, order, dtype):
    num_groups = shape[1] if num_groups == "channels" or shape[1] == 1 else num_groups
    x, weight, bias = inputs(*shape, dtype=dtype)
    assert_right(OP, order(x), num_groups, weight, bias)


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",)])
def test_without_weight_or_bias(assert_right, given):
    x, weight, bias = inputs(2, 6, 35)
    parameters = {"weight": weight, "bias": bias}
    chosen = {name: parameters[name].requires_grad_() for name in given}
    assert_right(OP, x.requires_grad_(), 3, **chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_fp32(assert_right, dtype):
    x, weight, bias = inputs(2, 6, 35)
    results = assert_right(OP, x.to(dtype), 3, weight, bias)
    assert results.outputs[0].dtype == dtype and results.gradients["weight"].dtype == torch.float32


@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("mean, deviation", [(10, 0.01), (30, 0.01), (300, 0.1), (-1e4, 1)])
def test_a_mean_far_above_the_deviation_costs_no_digits(mean, deviation, order):
    x = order(random(2, 32, 64) * deviation + mean)
    y, truth = ours(x, 8), torch.group_norm(x.double(), 8)
    assert (y - truth).abs().max() < 4e-6  # plain PyTorch: 2e-4 and more


def test_an_outlier_first_does_no_harm(assert_right):
    x, weight, bias = inputs(2, 4, 65)
    x[:, ::2, 0] = 1e4
    assert_right(OP, x, 2, weight, bias)


def test_a_group_of_one_value_is_the_bias():
    weight, bias = random(4, seed=1), random(4, seed=2)
    y = ours(torch.full((2, 4, 9), 77.7), 2, weight, bias)
    assert torch.equal(y, bias[:, None].expand(2, 4, 9))


@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_a_variance_past_the_range_gives_no_gradient_and_no_nan(scale):
    x = (random(2, 4, 64) * scale).requires_grad_()
    y = ours(x, 2)
    (dx,) = torch.autograd.grad(y, x, random(2, 4, 64, seed=1) * 1e10)
    assert not y.any() and not dx.any()


def test_nan_and_infinity_stay_in_their_group():
    x = random(2, 4, 9)
    x[0, 1, 3], x[1, 2, 0] = float("inf"), float("nan")
    torch.testing.assert_close(ours(x, 2), reference(x, 2), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 6, 5000), (1, 2, 70_001), (2, 130, 33)])
@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
def test_many_tiles_and_pieces(assert_right, shape, order):
    x, weight, bias = inputs(*shape)
    assert_right(OP, order(x), 2, weight, bias)


def test_one_position():
    # The rule asks for each number's own digits here, and sums of others stand in each.
    results = []
    for double, function in ((False, ours), (True, reference)):
        leaves = [leaf.double() if double else leaf for leaf in inputs(3, 200)]
        y = function(leaves[0].requires_grad_(), 2, *leaves[1:])
        results.append((y, *torch.autograd.grad(y, leaves[0], random(3, 200, seed=5).to(y))))
    for actual, truth in zip(*results, strict=True):
        assert (actual - truth).abs().max() < 2e-6


@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("shape", [(2, 6, 5000), (1, 70, 130), (3, 200, 1)])
def test_the_tiles_of_a_gpu(assert_right, shape, order):
    x, weight, bias = inputs(*shape)
    with launched_as_on(H200):
        assert_right(OP, order(x + 30), 2, weight, bias)


LAYOUTS = {
    "transposed": lambda: random(5, 6, 4, 3).transpose(0, 2).transpose(2, 3),
    "sliced positions": lambda: random(4, 6, 3, 7)[..., 1:-1],
    "sliced channels": lambda: random(4, 8, 3, 5)[:, 1:-1],
    "every other": lambda: random(4, 6, 3, 10)[..., ::2],
    "expanded samples": lambda: random(1, 6, 3, 5).expand(4, 6, 3, 5),
    "expanded positions": lambda: random(4, 6, 3, 1).expand(4, 6, 3, 5),
    "odd offset": lambda: random(361)[1:].view(4, 6, 3, 5),
    "channels last, sliced": lambda: channels_last(random(4, 6, 3, 7))[..., 1:-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "upstream", "both"])
def test_layouts(assert_right, layout, which):
    odd = LAYOUTS[layout]()
    plain, weight, bias = inputs(*odd.shape)
    x, dy = odd if which != "upstream" else plain, odd if which != "x" else plain
    stride_two = torch.stack([weight, bias], dim=1)
    assert_right(OP, x, 2, stride_two[:, 0], stride_two[:, 1], upstream=dy)


def test_order_of_memory():
    x = random(2, 4, 3, 5)
    assert ours(x, 2).is_contiguous()
    last = x.to(memory_format=torch.channels_last)
    assert ours(last, 2).is_contiguous(memory_format=torch.channels_last)
    assert ours(random(2, 5, 4).mT, 2).mT.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4)])
def test_empty(shape):
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(4, requires_grad=True)
    y = ours(x, 2, weight, weight)
    y.sum().backward()
    assert y.shape == shape == x.grad.shape and not weight.grad.any()


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_frozen_input_gets_no_gradient(frozen):
    leaves = dict(zip(("x", "weight", "bias"), inputs(2, 4, 9), strict=True))
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    dy = random(2, 4, 9, seed=3)
    every = torch.autograd.grad(ours(num_groups=2, **leaves), tuple(leaves.values()), dy)
    leaves[frozen] = leaves[frozen].detach()
    ours(num_groups=2, **leaves).backward(dy)
    for leaf, expected in zip(leaves.values(), every, strict=True):
        assert torch.equal(leaf.grad, expected) if leaf.requires_grad else leaf.grad is None


def test_double_backward_raises():
    x = random(2, 4, 9).requires_grad_()
    (gradient,) = torch.autograd.grad((ours(x, 2) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


def test_gradcheck():
    leaves = [leaf.double().requires_grad_() for leaf in inputs(2, 4, 5)]
    assert torch.autograd.gradcheck(lambda x, w, b: ours(x, 2, w, b), leaves, fast_mode=True)


def test_opcheck():
    x, weight, bias = inputs(2, 4, 3, 5)
    for each in (x, channels_last(x), x[..., 1:]):
        arguments = each.detach().requires_grad_(), 2, weight, bias, 1e-5, torch.float32
        torch.library.opcheck(torch.ops.nearlight.group_norm_fwd.default, arguments)
    statistics = torch.zeros(2, 2, 2), torch.ones(2, 2)
    with torch.no_grad():
        arguments = x, x, weight, *statistics, x.dtype, x.dtype, [True, False, True]
        torch.library.opcheck(torch.ops.nearlight.group_norm_bwd.default, arguments)


def test_compiled_without_a_graph_per_batch():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for samples in (3, 5, 6, 9):
        x, weight, bias = inputs(samples, 4, 7)
        x.requires_grad_()
        y = compiled(x, 2, weight, bias)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        eager = ours(x, 2, weight, bias)
        assert torch.equal(y, eager)
        assert torch.equal(dx, torch.autograd.grad(eager.square().sum(), x)[0])
    assert counter.frame_count <= 2


PAST_INT32 = """
import torch
from nearlight.ops.group_norm import group_norm
# Memory that nobody touches but where the samples lie: the last starts at element 2**31.
storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
x = storage.as_strided((3, 4, 6), (2**30, 6, 1)).copy_(torch.randn(3, 4, 6))
dy = storage.as_strided((3, 4, 6), (2**30, 6, 1), 24).copy_(torch.randn(3, 4, 6))
results = []
for a, b in ((x, dy), (x.clone(), dy.clone())):
    a.requires_grad_()
    y = group_norm(a, 2, backend="triton")
    results.append((y, *torch.autograd.grad(y, a, b)))
assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
print("right")
"""


def test_offsets_past_int32():
    # In a process of its own: an int32 offset would crash it.
    done = subprocess.run([sys.executable, "-c", PAST_INT32], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_refusals():
    x, weight, bias = inputs(2, 4, 3)
    with pytest.raises(TypeError, match="bias is torch.int64"):
        group_norm(x, 2, weight, bias.long())
    for groups in (3, 0, -2):
        with pytest.raises(ValueError, match="C a multiple of num_groups"):
            group_norm(x, groups)
    for wrong in (x[0, 0], x[:, :0]):
        with pytest.raises(ValueError, match=r"allowed is \(N, C, \.\.\.\)"):
            group_norm(wrong, 1)
    for wrong in (weight[:2], weight.to("meta")):
        with pytest.raises(ValueError, match=r"weight .* needs \(4,\) there"):
            group_norm(x, 2, wrong)
    with pytest.raises(ValueError, match="backend='cuda'"):
        group_norm(x, 2, backend="cuda")


def test_dtensor_is_refused():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(random(2, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="DTensor"):
            ours(x, 2)
    finally:
        dist.destroy_process_group()


def test_cost_counts_each_tensor_once():
    x, weight = torch.empty(2, 4, 6, dtype=torch.bfloat16), torch.empty(4)
    forward = formula_for("nearlight::group_norm_fwd")((x, 2, weight, None), {}, (x,))
    assert (forward.bytes_read, forward.bytes_written) == (96 + 16, 96)
    needs = [True, True, False]
    backward = formula_for("nearlight::group_norm_bwd")((x, x, weight, needs), {}, (x, weight))
    assert (backward.bytes_read, backward.bytes_written) == (2 * 96 + 16, 96 + 16)


def test_config():
    # Few groups of millions of elements keep every SM busy.
    few = config((1, 128, 512 * 512), torch.bfloat16, H200, False)
    assert few == Config(1, 2048, 15 * 2048, 4)
    assert config((16, 320, 4096), torch.bfloat16, H200, True).block_c == 64
    assert config((16, 320, 49), torch.bfloat16, H200, False).block_c * 64 == 2048
    for shape in ((1, 1, 1), (16, 320, 4096), (4, 128, 512 * 512)):
        for last in (False, True):
            ruled = config(shape, torch.bfloat16, H200, last)
            tried = candidates(shape, torch.bfloat16, H200, last)
            assert ruled in tried and ruled.piece % ruled.block_s == 0
    assert candidates((1, 1, 1), torch.bfloat16, None, False) == {}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []


def test_tensors_move_in_vectors_in_either_order():
    builds = [b for b in OP.builds("sm_90a") if b.kernel.fn.__name__ == "_group_norm_fwd_kernel"]
    assert len(builds) == 2
    for build in builds:
        ptx = compile_for(build, "sm_90a").ptx
        assert "st.global.v4.b32" in ptx, build.constants

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from nearlight.core.builds import check_budget
from nearlight.core.cost import formula_for
from nearlight.core.triton import compile_for, jit
from nearlight.ops._dropout import philox, threshold_and_scale
from nearlight.ops.dropout import OP, dropout, reference

SEED = torch.tensor([-5, (7 << 33) + 3])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(x, p=0.3, seed=SEED, **options):
    return dropout(x, p, seed=seed, backend="triton", **options)


def test_philox_gives_its_published_answers():
    zeros, ones = torch.tensor([0, 0]), torch.tensor([-1, -1])
    assert philox(zeros, zeros[:1]).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert philox(ones, ones[:1]).tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]


@jit
def _rand_kernel(out_ptr, seed_ptr, start, BLOCK: tl.constexpr):
    offsets = start + tl.arange(0, BLOCK).to(tl.int64)
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.rand(tl.load(seed_ptr), offsets))


@pytest.mark.parametrize("start", [0, 2**32 - 8, 2**40])
def test_philox_is_that_of_triton(start):
    out, seed = torch.empty(16), torch.tensor([-(2**40) + 3, 0])
    _rand_kernel[(1,)](out, seed, start, BLOCK=16)
    word = philox(seed, torch.arange(start, start + 16))[:, 0].to(torch.int32)
    uniform = torch.where(word < 0, -word - 1, word) * 4.6566127342e-10
    torch.testing.assert_close(out, uniform.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_independence(p):
    n = 1 << 20
    keep = ours(torch.ones(n), p) != 0
    std = (p * (1 - p) / n) ** 0.5
    assert abs((~keep).double().mean() - p) < 5 * std
    centred = keep.double() - (1 - p)
    other = (ours(torch.ones(n), p, SEED + torch.tensor([0, 1])) != 0).double() - (1 - p)
    pairs = [(centred[lag:], centred[: n - lag]) for lag in (1, 2, 3, 4, 5, 1024)]
    for left, right in (*pairs, (centred, other)):
        assert abs((left * right).mean()) < 5 * p * (1 - p) / len(left) ** 0.5
    # of each of the four words
    shares = (~keep).view(-1, 4).double().mean(0)
    assert ((shares - p).abs() < 5 * 2 * std).all()


def test_mean_stays():
    x = torch.full((1 << 18,), 3.0)
    assert abs(ours(x, 0.2).mean() - 3.0) < 5 * 3.0 * (0.2 / 0.8 / len(x)) ** 0.5


LAYOUTS = {
    "transposed rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed columns": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "sliced": lambda x: torch.cat([x, x], dim=1)[:, :6],
    "odd offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6, 8), (4, 6, 7), (3, 6, 1)])
def test_the_mask_knows_no_layout(layout, shape):
    x = random(*shape)
    laid = LAYOUTS[layout](x).requires_grad_()
    out = ours(laid)
    assert torch.equal(out, reference(x, 0.3, seed=SEED))
    (dx,) = torch.autograd.grad(out, laid, LAYOUTS[layout](x))
    assert torch.equal(dx, out)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 2, 4), (2, 3, 2, 2, 3, 2)])
def test_many_dimensions_and_their_order(shape):
    x = random(*shape)
    expected = reference(x, 0.3, seed=SEED)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for laid in (x, x.to(memory_format=formats.get(x.ndim, torch.contiguous_format))):
        assert torch.equal(ours(laid), expected) and ours(laid).stride() == laid.stride()
    flipped = x.permute(*reversed(range(x.ndim)))
    assert torch.equal(ours(flipped), reference(flipped, 0.3, seed=SEED))
    assert ours(flipped).is_contiguous()


def test_shape_does_not_change_the_mask():
    x = random(4 * 6 * 9)
    assert torch.equal(ours(x.view(4, 54)).flatten(), ours(x))
    assert torch.equal(ours(random(300)[:7]), ours(random(300))[:7])


def test_backward_draws_the_same_mask():
    x = torch.ones(5, 37, requires_grad=True)
    out = dropout(x, 0.4, backend="triton")  # of a seed that nobody knows
    out.backward(torch.ones(()).expand(5, 37))
    assert torch.equal(x.grad, out) and 0 < (out == 0).sum() < out.numel()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_torch_draws_the_seed(backend):
    x = torch.ones(4096)

    def draw():
        return dropout(x, 0.5, backend=backend)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_checkpointing_draws_the_mask_again():
    x = torch.ones(4096, requires_grad=True)
    out = checkpoint(lambda x: dropout(x * x, 0.5, backend="triton") * x, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, 3 * out)


def test_p_at_its_ends():
    x = random(3, 5)
    assert ours(x, 0.0) is x and ours(x, training=False) is x
    zero = ours(x.requires_grad_(), 1.0)
    zero.sum().backward()
    assert not zero.any() and not x.grad.any()
    assert threshold_and_scale(1.0) == (2**32 - 1, 0.0)
    assert threshold_and_scale(0.25) == (2**30, 4 / 3)


def test_nan_and_infinity_stay_as_in_pytorch():
    x = torch.tensor([float("nan"), float("inf")]).repeat(64)
    plain = torch.nn.functional.dropout(x, 0.5)
    assert ours(x, 0.5).isnan().sum() > 64 and not ours(x, 0.5).isfinite().any()
    assert not plain.isfinite().any()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), ()])
def test_empty_and_scalar(shape):
    x = torch.ones(shape, requires_grad=True)
    out = ours(x)
    out.sum().backward()
    assert out.shape == shape == x.grad.shape


def test_gradients_of_any_order():
    x = random(2, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(ours, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, (x,), fast_mode=True)


def test_opcheck():
    op = torch.ops.nearlight.dropout_fwd.default
    for x in (random(3, 4), random(4, 3).T, random(2, 3, 4, 5).transpose(1, 2)):
        torch.library.opcheck(op, (x.requires_grad_(), SEED, 0.3, torch.float32))


def test_compiled_without_a_graph_per_row_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for rows in (3, 5, 6, 9):
        x = random(rows, 8).requires_grad_()
        out = compiled(x)
        out.sum().backward()
        assert torch.equal(out, ours(x))
        assert torch.equal(x.grad, ours(torch.ones(rows, 8)))
    assert counter.frame_count <= 2


def test_compiled_draws_anew_by_each_call():
    compiled = torch.compile(lambda x: dropout(x, backend="triton"), backend="aot_eager")
    x = torch.ones(256)
    assert not torch.equal(compiled(x), compiled(x))


PAST_INT32 = """
import torch
from nearlight.ops.dropout import dropout
storage = torch.empty(2**31 + 32, dtype=torch.bfloat16)
x = storage.as_strided((3, 8), (2**30, 1)).copy_(torch.randn(3, 8))
seed = torch.tensor([1, 2])
left, right = (dropout(t, 0.5, seed=seed, backend="triton") for t in (x, x.clone()))
assert torch.equal(left, right)
print("right")
"""


def test_offsets_past_int32():
    # In a process of its own: an int32 offset would crash it.
    done = subprocess.run([sys.executable, "-c", PAST_INT32], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_refusals():
    x = random(2, 4)
    with pytest.raises(TypeError, match="torch.int64; allowed"):
        dropout(x.long())
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="allowed is 0"):
            dropout(x, p)
    with pytest.raises(TypeError, match=r"seed is int; pass torch.tensor\(\[seed"):
        dropout(x, seed=3)
    with pytest.raises(TypeError, match="seed is torch.int32"):
        dropout(x, seed=SEED.int())
    for seed in (SEED[:1], SEED.to("meta")):
        with pytest.raises(ValueError, match="a seed and an offset"):
            dropout(x, seed=seed)
    with pytest.raises(ValueError, match="backend='cuda'"):
        dropout(x, backend="cuda")


def test_dtensor_is_refused():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(random(2, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="DTensor"):
            ours(x)
    finally:
        dist.destroy_process_group()


def test_cost_counts_each_tensor_once():
    x, expanded = torch.empty(6, 4, dtype=torch.bfloat16), torch.empty(4).expand(6, 4)
    forward = formula_for("nearlight::dropout_fwd")((expanded, SEED, 0.1), {}, x)
    assert (forward.bytes_read, forward.bytes_written) == (16, 48)
    assert OP.cost(OP.cases[0])["forward_backward"].bytes == 4 * 16384 * 4096 * 2


def test_peer_takes_the_inputs_of_the_cases():
    inputs = OP.make_inputs(OP.check_cases[0], torch.device("cpu"), torch.Generator())
    assert OP.peers["torch"]()(**inputs).shape == inputs["x"].shape


def test_one_counter_serves_four_and_no_word_passes_shared_memory():
    build = OP.builds("sm_90a")[0]
    ptx = compile_for(build, "sm_90a").ptx
    assert build.constants["FOURS"] and "st.shared" not in ptx
    elements = build.constants["BLOCK_N"] // (32 * build.num_warps)
    # Ten rounds of two products, less what is equal for all in the first, for four elements.
    assert ptx.count("mul.hi.u32") <= 20 * elements // 4
    assert ptx.count("ld.global.v4.b32 ") == 2 == ptx.count("st.global.v4.b32 ")


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []

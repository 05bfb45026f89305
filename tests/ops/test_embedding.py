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
from nearlight.core.op import Case
from nearlight.core.triton import compile_for
from nearlight.ops.embedding import OP, embedding, reference
from nearlight.ops.embedding.kernels import candidates, config, gather, piece_length
from nearlight.ops.embedding.registration import backward

H200 = find_gpu("h200")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a GPU")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw(rows: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed))


def ours(indices, weight, **options):
    return embedding(indices, weight, backend="triton", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("options", [{}, {"scale": 5.7}, {"padding_idx": 2}])
def test_values_and_gradient(assert_right, shape, dtype, options):
    indices = draw(6, *shape)
    assert_right(OP, indices, random(6, 33, dtype=dtype).requires_grad_(), **options)
    assert_right(OP, indices.int(), random(6, 33, dtype=dtype).requires_grad_(), **options)


def test_integers_add_up_exactly():
    # Pieces, what stands before and after them, and segments without a whole piece.
    counts = torch.tensor([1, 40, 0, 31, 700, 5, 64, 200])
    indices = torch.repeat_interleave(torch.arange(8), counts)
    indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))]
    dout = torch.randint(-9, 9, (len(indices), 5)).float()
    expected = torch.zeros(8, 5).index_add_(0, indices, dout)
    weight = torch.zeros(8, 5, requires_grad=True)
    for gpu in (None, H200):
        with launched_as_on(gpu):
            out = ours(indices, weight)
            assert torch.equal(torch.autograd.grad(out, weight, dout)[0], expected)


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 96, 1024])
@pytest.mark.parametrize("before", [0, 1, 32])
def test_a_segment_at_each_edge_of_a_piece(count, before):
    indices = torch.cat([torch.zeros(before), torch.ones(count), torch.full((3,), 3)]).long()
    dout = torch.arange(len(indices) * 2.0).view(-1, 2)
    weight = torch.zeros(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(indices, weight), weight, dout)
    assert torch.equal(gradient, torch.zeros(4, 2).index_add_(0, indices, dout))


def test_half_precision_is_summed_in_fp32():
    # In bf16 a sum of ones stays at 256.
    weight = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    ours(torch.zeros(4096, dtype=torch.int64), weight).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[4096.0], [0.0]]).bfloat16().expand(2, 3))


def test_rows_that_nobody_used_are_zero():
    weight = random(9, 4).requires_grad_()
    ours(torch.tensor([2, 7, 2]), weight).sum().backward()
    assert weight.grad[:, 0].tolist() == [0, 0, 2, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
def test_padding_has_a_row_and_no_gradient(padding_idx):
    weight, indices = random(4, 5).requires_grad_(), draw(4, 200)
    out = ours(indices, weight, padding_idx=padding_idx)
    assert torch.equal(out, weight[indices])
    out.sum().backward()
    assert not weight.grad[padding_idx].any() and weight.grad.count_nonzero() == 3 * 5


LAYOUTS = {
    "transposed": lambda: random(7, 6).T,
    "sliced": lambda: random(6, 9)[:, 1:-1],
    "every other": lambda: random(12, 14)[::2, ::2],
    "expanded rows": lambda: random(1, 7).expand(6, 7),
    "expanded columns": lambda: random(6, 1).expand(6, 7),
    "odd offset": lambda: random(43)[1:].view(6, 7),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, layout):
    indices = draw(6, 4, 3)
    dout = random(3, 7, 4, seed=2).permute(2, 0, 1)
    assert_right(OP, indices, LAYOUTS[layout]().detach().requires_grad_(), upstream=dout)
    dout = random(1, 1, 1).expand(4, 3, 7)
    assert_right(OP, indices.T.contiguous().T, LAYOUTS[layout](), upstream=dout)
    assert torch.equal(ours(indices[:, :1].expand(4, 3), random(6, 7)).unbind(1)[2],
                       random(6, 7)[indices[:, 0]])  # fmt: skip


@pytest.mark.parametrize("tokens, rows, width", [(0, 4, 3), (5, 4, 0), (0, 0, 3), (0, 4, 0)])
def test_empty(tokens, rows, width):
    weight = torch.ones(rows, width, requires_grad=True)
    out = ours(torch.zeros(tokens, dtype=torch.int64), weight)
    out.sum().backward()
    assert out.shape == (tokens, width) and not weight.grad.any()


def test_plain_rows_without_columns_keep_away_from_a_fault_of_torch():
    # There the gradient of F.embedding reads from address 0, and a GPU's process is lost.
    weight, indices = torch.ones(4, 0, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    out = embedding(indices, weight, backend="reference", scale=2.0)
    nodes = [out.grad_fn]
    for node in nodes:
        nodes += [other for other, _ in node.next_functions if other is not None]
    assert not any("Embedding" in node.name() for node in nodes)
    out.sum().backward()
    assert out.shape == (2, 3, 0) and weight.grad.shape == (4, 0)


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("index", [-1, 4, 2**31 + 1, 2**40, -(2**40)])
def test_an_index_outside_is_an_error(index, backend):
    with pytest.raises(ValueError, match=rf"not in \[0, 4\): {index}"):
        embedding(torch.tensor([0, index, 3]), random(4, 5), backend=backend)
    with pytest.raises(ValueError, match=r"not in \[0, 0\)"):
        embedding(torch.tensor([0]), random(0, 5), backend=backend)


@pytest.mark.parametrize("gpu", [None, H200])
def test_an_index_outside_reads_and_adds_nothing(gpu):
    indices, weight = torch.tensor([4, 0, -1, 2**31 + 1, -(2**40)]), random(4, 5)
    out, is_right = torch.full((5, 5), torch.nan), torch.ones((), dtype=torch.int32)
    with launched_as_on(gpu):
        gather(out, indices, weight, is_right, 1.0)
        assert is_right == 0 and torch.equal(out[1], weight[0])
        assert out.count_nonzero() == 5
        gradient = backward(torch.ones(3, 5), indices[:3], 4, 1.0, -1)
    assert torch.equal(gradient, torch.eye(4)[:1].T.expand(4, 5))


@needs_gpu
def test_an_index_outside_is_an_error_of_the_device():
    # In a process of its own, which can do no more afterwards.
    code = """
import torch; from nearlight.ops import embedding
embedding(torch.tensor([4], device="cuda"), torch.ones(4, 5, device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "device-side assert" in done.stderr


def test_the_smaller_tiles_of_a_gpu_give_the_same(assert_right):
    with launched_as_on(H200):
        assert_right(OP, draw(5, 300), random(5, 130).requires_grad_(), scale=0.3)
        assert_right(OP, draw(70, 9), random(70, 3).requires_grad_())
        # several tiles of rows in turn, and more places for them than there are rows
        assert_right(OP, draw(9, 40), random(9, 600).requires_grad_(), padding_idx=4)


def test_backward_twice_gives_the_same_and_inputs_stay():
    indices, weight, dout = draw(5, 90), random(5, 4).requires_grad_(), random(90, 4, seed=2)
    out = ours(indices, weight)
    first = torch.autograd.grad(out, weight, dout, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, weight, dout)[0])
    assert indices._version == weight._version == dout._version == 0


def test_double_backward_raises():
    weight = random(5, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(
        (ours(draw(5, 3), weight) ** 2).sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="backend='reference'"):
        gradient.sum().backward()


def test_gradcheck():
    weight = random(3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: ours(draw(3, 40), w, scale=1.7), (weight,))


def test_opcheck():
    indices, weight = draw(6, 2, 4), random(4, 6).T.requires_grad_()
    torch.library.opcheck(torch.ops.nearlight.embedding_fwd.default, (indices, weight, 2.0, 1))
    with torch.no_grad():
        args = random(2, 4, 4), indices, 6, 2.0, -1
        torch.library.opcheck(torch.ops.nearlight.embedding_bwd.default, args)


def test_compiled_without_a_graph_per_token_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    weight = random(5, 8).requires_grad_()
    for tokens in (3, 5, 6, 90):
        indices = draw(5, tokens)
        out = compiled(indices, weight)
        (gradient,) = torch.autograd.grad(out.square().sum(), weight)
        eager = ours(indices, weight)
        assert torch.equal(out, eager)
        assert torch.equal(gradient, torch.autograd.grad(eager.square().sum(), weight)[0])
    assert counter.frame_count <= 2


PAST_INT32 = """
import itertools, torch
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.ops.embedding import embedding
# Memory that nobody touches but where the values lie: the last one starts at element 2**31.
storage = torch.empty(2**31 + 32, dtype=torch.bfloat16)
layouts = ((3, 8), (2**30, 1)), ((8, 3), (1, 2**30))
gpus, dtypes = (None, find_gpu("h200")), (torch.int32, torch.int64)
for (shape, strides), gpu, dtype in itertools.product(layouts, gpus, dtypes):
    weight = storage.as_strided(shape, strides).copy_(torch.randn(shape))
    dout = storage.as_strided(shape, strides, 8).copy_(torch.randn(shape))
    indices = torch.arange(shape[0], dtype=dtype).flip(0)
    indices[-1] = shape[0] - 1
    results = []
    for w, g in ((weight, dout), (weight.clone(), dout.clone())):
        w = w.detach().requires_grad_()
        with launched_as_on(gpu):
            out = embedding(indices, w, backend="triton")
            results.append((out, *torch.autograd.grad(out, w, g)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(out, weight[indices])
print("right")
"""


def test_offsets_past_int32():
    # In a process of its own: an int32 offset would crash it.
    done = subprocess.run([sys.executable, "-c", PAST_INT32], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_large_cases_pass_int32_and_leave_room_for_others():
    for case in OP.large_cases:
        longest = max(case.shape["T"], case.shape["V"])
        assert (longest - 8) * case.shape["D"] >= 2**31
        # `check` holds an upstream gradient in fp64 and twice in bf16, or a table's truth
        assert longest * case.shape["D"] * (8 + 2 + 2) < 25 * 2**30
    inputs = OP.make_inputs(OP.check_cases[-1], torch.device("cpu"), torch.Generator())
    assert inputs["indices"][-1] == len(inputs["weight"]) - 1 and inputs["weight"].requires_grad


@needs_gpu
def test_the_gradient_of_a_table_past_int32():
    rows = 2**19 + 8
    table = torch.zeros(1, 4096, dtype=torch.bfloat16, device="cuda").expand(rows, 4096)
    indices = torch.tensor([rows - 1, 0, rows - 1], device="cuda")
    weight = table.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ours(indices, weight).sum(), weight)
    assert bool((gradient[-1] == 2).all()) and bool((gradient[0] == 1).all())
    assert gradient.count_nonzero() == 2 * 4096


def test_refusals():
    indices, weight = draw(4, 3), random(4, 5)
    with pytest.raises(TypeError, match="torch.float32; use indices.long"):
        embedding(weight, weight)
    with pytest.raises(TypeError, match="weight is torch.int64"):
        embedding(indices, weight.long())
    for wrong in (weight[0], weight.to("meta")):
        with pytest.raises(ValueError, match=r"allowed is \(V, D\)"):
            embedding(indices, wrong)
    for padding_idx in (4, -5):
        with pytest.raises(ValueError, match="allows -4 to 3"):
            embedding(indices, weight, padding_idx=padding_idx)
    with pytest.raises(ValueError, match="backend='cuda'"):
        embedding(indices, weight, backend="cuda")


def test_dtensor_is_refused():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(random(4, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="DTensor"):
            ours(draw(4, 3), weight)
    finally:
        dist.destroy_process_group()


def test_auto_is_plain_pytorch_on_the_cpu():
    indices, weight = draw(4, 3), random(4, 5)
    assert torch.equal(embedding(indices, weight, scale=3.0), weight[indices] * 3.0)
    assert torch.equal(reference(indices, weight), weight[indices])


def test_cost_counts_each_row_once():
    indices, weight = torch.zeros(10, dtype=torch.int64), torch.empty(4, 6, dtype=torch.bfloat16)
    out = weight.new_empty(10, 6)
    forward = formula_for("nearlight::embedding_fwd")((indices, weight), {}, out)
    assert (forward.bytes_read, forward.bytes_written) == (80 + 4 * 12, 120)
    backward = formula_for("nearlight::embedding_bwd")((out, indices), {}, weight)
    assert (backward.bytes_read, backward.bytes_written) == (80 + 120, 48)


@pytest.mark.parametrize("tokens, rows", [(16384, 32000), (16384, 262144), (3000, 7)])
def test_cost_of_a_case_counts_the_rows_that_its_tokens_name(tokens, rows):
    case = Case("", {"T": tokens, "V": rows, "D": 2})
    indices = OP.make_inputs(case, torch.device("cpu"), torch.Generator())["indices"]
    read = OP.cost(case)["forward"].bytes_read - 8 * tokens
    assert read / 4 == pytest.approx(len(indices.unique()), rel=0.02)


def test_config():
    assert config((16384, 4096), torch.bfloat16, H200).block_n == 4096
    backward = config((128256, 4096), torch.bfloat16, H200, "backward")
    assert (backward.block_rows, backward.block_n, backward.num_tiles) == (1, 1024, 4)
    assert config((1, 1), torch.bfloat16, H200, "backward").num_tiles == 1
    for direction in ("forward", "backward"):
        for shape in ((1, 1), (128256, 4096), (50257, 2880)):
            ruled = config(shape, torch.bfloat16, H200, direction)
            tried = candidates(shape, torch.bfloat16, H200, direction)
            assert ruled in tried and not any(tried.values())
    assert candidates((1, 1), torch.bfloat16, None, "forward") == {}


def test_pieces_are_few_and_short():
    for tokens in (1, 31, 1000, 16384, 131072, 10**7):
        piece = piece_length(tokens)
        assert piece & (piece - 1) == 0 and 32 <= piece <= max(32, tokens**0.5)
        assert tokens // piece + 2 * piece <= 4 * max(tokens, 256) ** 0.5


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []


@pytest.mark.parametrize("kernel", ["_embedding_fwd_kernel", "_embedding_bwd_kernel"])
def test_rows_move_in_16_byte_vectors(kernel):
    builds = [b for b in OP.builds("sm_90a") if b.kernel.fn.__name__ == kernel]
    assert {4096, 2880} < {build.constants["N"] for build in builds}
    for build in builds:
        if build.constants["N"] > 1:
            ptx = compile_for(build, "sm_90a").ptx
            assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx

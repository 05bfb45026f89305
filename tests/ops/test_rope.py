import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.cohere import modeling_cohere
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.phi3 import modeling_phi3

from nearlight.core.builds import check_budget
from nearlight.core.cost import formula_for
from nearlight.core.hardware import find_gpu
from nearlight.core.triton import compile_for
from nearlight.ops.rope import OP, Config, config, reference, rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(batch, tokens, num_heads, width, dtype=torch.float32, seed=0):
    """(B, H, S, D) as a projection writes it: a view of (B, S, H, D)."""
    return random(batch, tokens, num_heads, width, dtype=dtype, seed=seed).transpose(1, 2)


def tables(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Every entry its own angle, so that no entry can stand in for another."""
    angles = random(*shape, seed=5) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def ours(*inputs, **options):
    return rope(*inputs, **options, backend="triton")


def run(function, q, k, cos, sin, upstream, **options):
    leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    outputs = function(*leaves, cos, sin, **options)
    return *outputs, *torch.autograd.grad(outputs, leaves, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads, num_key_heads", [(1, 1), (9, 3), (14, 2), (5, 5), (2, 3)])
def test_any_ratio_of_heads_as_llama(assert_right, num_heads, num_key_heads, dtype):
    rotary = modeling_llama.LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    )
    q = heads(2, 5, num_heads, 16, dtype)
    k = heads(2, 5, num_key_heads, 16, dtype, seed=1)
    cos, sin = rotary(q, torch.arange(5)[None] + torch.tensor([[0], [3]]))
    assert cos.shape == (2, 5, 16)
    assert_right(OP, q, k, cos, sin, plain=modeling_llama.apply_rotary_pos_emb)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary_as_phi3(assert_right, dtype):
    q, k = heads(2, 5, 4, 12, dtype), heads(2, 5, 2, 12, dtype, seed=1)
    cos, sin = tables(1, 5, 4, dtype=dtype)
    out = assert_right(OP, q, k, cos, sin, plain=modeling_phi3.apply_rotary_pos_emb).outputs
    assert torch.equal(out[0][..., 4:], q[..., 4:]) and torch.equal(out[1][..., 4:], k[..., 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_as_cohere(assert_right, dtype):
    q, k = heads(2, 5, 4, 6, dtype), heads(2, 5, 2, 6, dtype, seed=1)
    cos, sin = (table.repeat_interleave(2, -1) for table in tables(1, 5, 3, dtype=dtype))
    assert_right(OP, q, k, cos, sin, plain=modeling_cohere.apply_rotary_pos_emb, interleaved=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_half_tables_as_gptj(assert_right, dtype):
    q, k = random(2, 5, 4, 6, dtype=dtype), random(2, 5, 4, 6, dtype=dtype, seed=1)
    cos, sin = tables(2, 5, 3, dtype=dtype)

    def gptj(q, k, cos, sin):
        return tuple(modeling_gptj.apply_rotary_pos_emb(x, sin, cos) for x in (q, k))

    assert_right(OP, q, k, cos, sin, plain=gptj, interleaved=True, rotary_dim=6, heads_dim=2)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("table", [(5, 8), (1, 5, 8), (2, 5, 8), (5, 4), (2, 5, 4), (5, 2)])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_tables(assert_right, table, is_interleaved, heads_dim):
    q, k = random(2, 5, 3, 10), random(2, 5, 2, 10, seed=1)
    if heads_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotary_dim = 2 * table[-1] if table[-1] < 8 else None
    assert_right(
        OP,
        q,
        k,
        *tables(*table),
        interleaved=is_interleaved,
        rotary_dim=rotary_dim,
        heads_dim=heads_dim,
    )


def test_tables_in_fp32_beside_bf16_heads(assert_right):
    q, k = heads(1, 5, 3, 8, torch.bfloat16), heads(1, 5, 2, 8, torch.bfloat16, seed=1)
    out = assert_right(OP, q, k, *tables(5, 8)).outputs
    assert out[0].dtype == torch.bfloat16


LAYOUTS = {
    "(B, H, S, D)": lambda: random(2, 3, 5, 8),
    "(S, B, H, D)": lambda: random(5, 2, 3, 8).permute(1, 2, 0, 3),
    "part of a fused projection": lambda: random(2, 5, 7, 8)[:, :, 2:5].transpose(1, 2),
    "sliced tokens": lambda: random(2, 3, 6, 8)[:, :, 1:],
    "sliced batch": lambda: random(4, 3, 5, 8)[::2],
    "every other entry": lambda: random(2, 3, 5, 16)[..., ::2],
    "width outermost": lambda: random(8, 5, 3, 2).permute(3, 2, 1, 0),
    "expanded heads": lambda: random(2, 1, 5, 8).expand(2, 3, 5, 8),
    "one number": lambda: random(1).expand(2, 3, 5, 8),
    "odd offset": lambda: random(241)[1:].view(2, 3, 5, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "upstream", "all"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_layouts(assert_right, layout, which, is_interleaved):
    odd, plain = LAYOUTS[layout](), random(2, 3, 5, 8, seed=3)
    q, k, dq = (odd if which in (name, "all") else plain for name in ("q", "k", "upstream"))
    assert_right(OP, q, k, *tables(5, 6), upstream=[dq, plain], interleaved=is_interleaved)


@pytest.mark.parametrize(
    "table",
    [
        lambda: random(8, 5).T,
        lambda: random(5, 16)[:, ::2],
        lambda: random(1, 5, 8).expand(2, 5, 8),
        lambda: random(2, 6, 8)[:, 1:],
    ],
)
def test_table_layouts(assert_right, table):
    cos = table()
    for sin in (cos, cos.contiguous() + 1):
        assert_right(OP, heads(2, 5, 3, 8), heads(2, 5, 2, 8, seed=1), cos, sin)


def test_order_of_memory_is_kept():
    q, k = heads(2, 5, 3, 8), random(2, 5, 9, 8)[:, :, 3:5].transpose(1, 2)
    q_out, k_out, dq, dk = run(ours, q, k, *tables(5, 8), upstream=[q, k])
    # Attention reads (B, S, H, D), and the gradient goes back into the projection as a view.
    for x in (q_out, dq):
        assert x.transpose(1, 2).is_contiguous()
    for x in (k_out, dk):
        assert x.transpose(1, 2).is_contiguous()
    assert ours(random(2, 3, 5, 8), k, *tables(5, 8))[0].is_contiguous()


def test_positions_pick_rows(assert_right):
    q, k = heads(2, 4, 3, 8), heads(2, 4, 1, 8, seed=1)
    for positions in (
        torch.tensor([[0, 1, 2, 3], [9, 9, 0, 5]]),
        torch.tensor([[3, 1, 4, 1]]),
        torch.tensor([[0, 1, 2, 3], [9, 9, 0, 5]], dtype=torch.int32),
        torch.arange(8).view(4, 2).T,
        torch.arange(4)[None].expand(2, 4),
    ):
        assert_right(OP, q, k, *tables(10, 8), position_ids=positions)
        assert_right(
            OP, q, k, *tables(10, 3), position_ids=positions, rotary_dim=6, interleaved=True
        )


def test_every_row_is_written_with_left_padding(assert_right, monkeypatch):
    # Left padding gives negative positions; rows of them were left uninitialised elsewhere.
    def poisoned(x, empty_like=torch.empty_like):
        return empty_like(x).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty_like", poisoned)
    q, k = heads(2, 5, 3, 8), heads(2, 5, 2, 8, seed=1)
    cos, sin = tables(7, 6)
    positions = torch.tensor([[-3, -2, -1, 0, 1], [0, 1, 2, 3, 4]])
    assert_right(OP, q, k, cos, sin, position_ids=positions)


def test_positions_outside_of_the_table(monkeypatch):
    q, k = heads(1, 4, 3, 8), heads(1, 4, 2, 8, seed=1)
    cos, sin = tables(6, 8)
    for bad in (6, -7):
        positions = torch.tensor([[0, bad, 5, -6]])
        with pytest.raises(IndexError, match=rf"{bad}.*6 rows"):
            ours(q, k, cos, sin, position_ids=positions)
        # On a GPU nothing waits for that answer: the row becomes NaN, its neighbours are right.
        with monkeypatch.context() as patch:
            registration = sys.modules["nearlight.ops.rope.registration"]
            patch.setattr(registration, "_check_positions", lambda *_: None)
            actual = ours(q, k, cos, sin, position_ids=positions)
        inside = positions.where(positions.abs() < 6, 0).where(positions != -6, -6)
        expected = ours(q, k, cos, sin, position_ids=inside)
        for one, other in zip(actual, expected, strict=True):
            assert one[:, :, 1].isnan().all()
            kept = [0, 2, 3]
            assert torch.equal(one[:, :, kept], other[:, :, kept])


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("tile", [(2, 2, 2, False), (1, 4, 1, False), (4, 2, 2, True)])
@pytest.mark.parametrize("tokens, num_heads, width", [(3, 3, 10), (4, 4, 8), (5, 5, 8), (1, 1, 6)])
def test_tile_edges_as_on_a_gpu(
    assert_right, monkeypatch, tile, tokens, num_heads, width, is_interleaved
):
    block_s, block_h, block_hk, share_angles = tile
    chosen = Config(block_s, block_h, block_hk, 4, share_angles, num_warps=4)
    registration = sys.modules["nearlight.ops.rope.registration"]
    monkeypatch.setattr(registration, "config", lambda *_: chosen)
    q, k = heads(2, tokens, num_heads, width), heads(2, tokens, 3, width, seed=1)
    rotary_dim = min(width, 8)
    assert_right(OP, q, k, *tables(2, tokens, rotary_dim), interleaved=is_interleaved)
    positions = torch.randint(-9, 9, (2, tokens), generator=torch.Generator().manual_seed(0))
    half = tables(9, rotary_dim // 2)
    assert_right(
        OP, q, k, *half, position_ids=positions, rotary_dim=rotary_dim, interleaved=is_interleaved
    )


def test_config():
    gpu = find_gpu("h200")
    # A thread takes two vectors of 16 bytes from each half; 16 heads share a token's angles.
    assert config((8192, 32, 8, 64), torch.bfloat16, gpu) == Config(2, 16, 8, 64, False, 4)
    assert config((8192, 14, 2, 64), torch.float32, gpu) == Config(1, 16, 2, 64, False, 4)
    assert config((1, 9, 3, 32), torch.bfloat16, gpu) == Config(1, 16, 4, 32, False, 4)
    assert config((8192, 1, 1, 512), torch.float64, gpu) == Config(1, 1, 1, 512, False, 4)
    # The interpreter takes 128 tokens of SmolLM2 in two programs, one for q and one for k.
    assert config((128, 9, 3, 32), torch.float32, None) == Config(128, 16, 4, 32, True, 4)
    assert config((4096, 32, 8, 64), torch.float32, None) == Config(128, 32, 8, 64, True, 4)


def test_more_tokens_than_a_grid_axis_takes(assert_right):
    q, k = heads(1, 66_000, 1, 2), heads(1, 66_000, 1, 2, seed=1)
    assert_right(OP, q, k, *tables(66_000, 2))


@pytest.mark.parametrize(
    "sizes", [(0, 3, 2, 1, 4), (2, 0, 2, 1, 4), (2, 3, 0, 1, 4), (2, 3, 2, 0, 4)]
)
def test_empty(assert_right, sizes):
    batch, tokens, num_heads, num_key_heads, width = sizes
    q, k = heads(batch, tokens, num_heads, width), heads(batch, tokens, num_key_heads, width)
    assert_right(OP, q, k, *tables(tokens, width))
    positions = torch.zeros(batch, tokens, dtype=torch.int64)
    assert ours(q, k, *tables(5, width), position_ids=positions)[0].shape == q.shape


def test_inputs_stay_and_backward_twice_gives_the_same():
    inputs = [heads(2, 3, 2, 4), heads(2, 3, 1, 4, seed=1), *tables(3, 4)]
    kept = [x.clone() for x in inputs]
    q, k = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    outputs = ours(q, k, *inputs[2:])
    upstream = [x.detach().clone() for x in outputs]
    first = torch.autograd.grad(outputs, [q, k], upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, [q, k], upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
    assert all(x._version == 0 for x in (*inputs, *upstream))
    assert all(torch.equal(a, b) for a, b in zip(outputs, upstream, strict=True))


@pytest.mark.parametrize("trained", ["q", "k"])
def test_one_frozen_and_one_unused(trained):
    q, k = heads(2, 3, 2, 4).requires_grad_(), heads(2, 3, 1, 4, seed=1).requires_grad_()
    cos, sin = tables(3, 4)
    index = "qk".index(trained)
    leaf = (q, k)[index]
    (expected,) = torch.autograd.grad(ours(q, k, cos, sin)[index].sum(), leaf)
    (q, k)[1 - index].requires_grad_(False)
    ours(q, k, cos, sin)[index].sum().backward()
    assert torch.equal(leaf.grad, expected)
    assert (q, k)[1 - index].grad is None


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_first_and_second_derivatives(is_interleaved):
    q = heads(1, 2, 2, 4).double().requires_grad_()
    k = heads(1, 2, 1, 4, seed=1).double().requires_grad_()
    cos, sin = (table.double() for table in tables(2, 2))

    def function(q, k):
        return ours(q, k, cos, sin, interleaved=is_interleaved)

    assert torch.autograd.gradcheck(function, (q, k), fast_mode=True)
    # The map is linear: the gradient by the upstream gradient is the map itself.
    outputs = function(q, k)
    upstream = [torch.randn_like(x).requires_grad_() for x in outputs]
    gradients = torch.autograd.grad(outputs, (q, k), upstream, create_graph=True)
    weights = [torch.randn_like(x) for x in gradients]
    second = torch.autograd.grad(gradients, upstream, weights)
    expected = reference(*weights, cos, sin, interleaved=is_interleaved)
    for one, other in zip(second, expected, strict=True):
        assert torch.equal(one, other)


def test_tables_that_want_a_gradient():
    q, k = heads(1, 3, 2, 4), heads(1, 3, 1, 4, seed=1)
    cos, sin = tables(3, 4)
    for name in ("cos", "sin"):
        given = {"cos": cos, "sin": sin, name: random(3, 4).requires_grad_()}
        with pytest.raises(ValueError, match="backend='reference'"):
            ours(q, k, given["cos"], given["sin"])
        rope(q, k, given["cos"], given["sin"])[0].sum().backward()
        assert given[name].grad is not None


def test_opcheck():
    q, k = heads(2, 3, 2, 4).requires_grad_(), random(2, 3, 4, 1)[..., 0]
    k = random(2, 1, 3, 8, seed=1)[..., ::2].requires_grad_()
    cos, sin = tables(7, 4)
    positions = torch.tensor([[0, 1, 2], [-1, 3, 6]])
    for op in (torch.ops.nearlight.rope_fwd.default, torch.ops.nearlight.rope_bwd.default):
        torch.library.opcheck(op, (q, k, cos[:3], sin[:3], None, False, 4, 1))
    torch.library.opcheck(
        torch.ops.nearlight.rope_fwd.default, (q, k, cos, sin, positions, True, 4, 1)
    )


def test_compiled_without_a_graph_per_length():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for tokens in (3, 5, 6, 9):
        q, k = heads(2, tokens, 2, 4).requires_grad_(), heads(2, tokens, 1, 4, seed=1)
        cos, sin = tables(1, tokens, 4)
        q_out, _ = compiled(q, k, cos, sin)
        eager = ours(q, k, cos, sin)[0]
        assert torch.equal(q_out, eager)
        assert q_out.stride() == q.stride()
        q_out.sum().backward()
        assert torch.equal(q.grad, torch.autograd.grad(eager.sum(), q)[0])
    assert counter.frame_count <= 2


PAST_INT32 = """
import torch
from nearlight.ops.rope import rope
# 4 GiB that nobody touches but where the tokens lie: the last starts at element 2**31.
storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
q = storage.as_strided((1, 2, 3, 8), (0, 8, 2**30, 1)).copy_(torch.randn(1, 2, 3, 8))
k = storage.as_strided((3, 1, 1, 8), (2**30, 8, 8, 1), 16).copy_(torch.randn(3, 1, 1, 8))
angles = torch.randn(3, 8)
for inputs in ((q, q), (k, k)):
    tokens = inputs[0].shape[2]
    table = angles[:tokens].cos().bfloat16(), angles[:tokens].sin().bfloat16()
    results = []
    for near in (inputs, [x.clone() for x in inputs]):  # the copies' tokens lie side by side
        leaves = [x.detach().requires_grad_() for x in near]
        outputs = rope(*leaves, *table, backend="triton")
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
print("right")
"""


def test_offsets_past_int32():
    # In a process of its own: an int32 offset would crash it.
    done = subprocess.run([sys.executable, "-c", PAST_INT32], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


def test_refusals():
    q, k, (cos, sin) = heads(2, 3, 4, 8), heads(2, 3, 2, 8), tables(3, 8)
    positions = torch.zeros(2, 3, dtype=torch.int64)
    for error, message, change in [
        (TypeError, "allowed are fp16", {"q": q.long()}),
        (TypeError, "the same for q and k", {"k": k.bfloat16()}),
        (TypeError, "allowed int64 and int32", {"position_ids": positions.float()}),
        (ValueError, "four dimensions", {"q": q[0]}),
        (ValueError, "agree in all but the heads", {"k": k[:, :, :2]}),
        (ValueError, "heads_dim=3", {"heads_dim": 3}),
        (ValueError, "rotary_dim=7", {"rotary_dim": 7}),
        (ValueError, "rotary_dim=10", {"rotary_dim": 10}),
        (ValueError, r"cos \(4, 8\)", {"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}),
        (ValueError, r"sin \(3, 6\)", {"sin": sin[:, :6]}),
        (ValueError, "width 8, allowed is rotary_dim=4", {"rotary_dim": 4}),
        (ValueError, r"P, W\) with position_ids", {"position_ids": positions, "cos": cos[None]}),
        (ValueError, r"position_ids \(2, 2\)", {"position_ids": positions[:, :2]}),
        (ValueError, "move them", {"k": k.to("meta")}),
        (ValueError, "backend='gpu'", {"backend": "gpu"}),
    ]:
        with pytest.raises(error, match=message):
            rope(**({"q": q, "k": k, "cos": cos, "sin": sin} | change))


def test_auto_is_plain_pytorch_on_the_cpu():
    q, k, (cos, sin) = heads(2, 3, 4, 8), heads(2, 3, 2, 8), tables(1, 3, 8)
    plain = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(rope(q, k, cos, sin), plain, strict=True))


def test_cost_counts_each_tensor_once():
    formula = formula_for("nearlight::rope_bwd")
    q, k = torch.empty(2, 4, 3, 8, dtype=torch.bfloat16), torch.empty(2, 1, 3, 8).bfloat16()
    table = torch.empty(1, 3, 8, dtype=torch.bfloat16)
    one = formula((q, k, table, table, None, False, 8, 1), {}, (q, k))
    moved = 2 * (q.numel() + k.numel())
    assert (one.bytes_read, one.bytes_written) == (moved + 2 * 3 * 8 * 2, moved)
    # Positions pick two rows per sequence of a long table: only these are counted.
    long, positions = torch.empty(100, 8), torch.zeros(2, 3, dtype=torch.int64)
    picked = formula((q, k, long, long, positions, False, 8, 1), {}, (q, k))
    assert picked.bytes_read == moved + 2 * 6 * 8 * 4 + 6 * 8
    total = OP.cost(OP.cases[0])["forward_backward"]
    # q and k (40 heads) once in and once out, and the tables once, each way.
    assert total.bytes == 2 * (2 * 4 * 8192 * 40 * 128 * 2 + 2 * 8192 * 128 * 2)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_move_in_16_byte_vectors(is_interleaved):
    build = next(b for b in OP.builds("sm_90a") if b.constants["INTERLEAVED"] == is_interleaved)
    code = compile_for(build, "sm_90a")
    widths = {kind: re.findall(rf"{kind}\.global\.(\S+)", code.ptx) for kind in ("ld", "st")}
    heads = [width for width in widths["ld"] if width != "b64"]  # the rest are positions
    assert len(heads) >= 12 and set(heads) <= {"v4.b32", "v2.b64"}
    assert len(widths["st"]) >= 4 and set(widths["st"]) <= {"v4.b32", "v2.b64"}
    assert code.shared_bytes == 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []

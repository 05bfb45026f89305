from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nearlight.core.builds import check_budget
from nearlight.core.cost import formula_for
from nearlight.core.hardware import GPUS, find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.core.triton import compile_for
from nearlight.ops.dropout import dropout
from nearlight.ops.lora_linear import OP, lora_linear, reference
from nearlight.ops.lora_linear.record import case_of
from nearlight.ops.lora_linear.tiles import MAX_RANK, across_config, down_config, up_config
from nearlight.workbench.launches import launches
from nearlight.workbench.properties import values
from nearlight.workbench.trial import Trial

FWD = torch.ops.nearlight.lora_linear_fwd.default
BWD = torch.ops.nearlight.lora_linear_bwd.default
SEED = torch.tensor([11, -(2**50)])
H200 = find_gpu("h200")
LEAVES = ("x", "weight", "lora_a", "lora_b", "bias")


def make(rows=6, inner=10, outer=7, rank=3, dtype=torch.float32, adapter=None, bias=True):
    """An adapter that weighs as much as the layer, each part with a gradient."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=dtype):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (drawn / shape[-1] ** 0.5).to(dtype).requires_grad_()

    adapter = adapter or dtype
    return {
        "x": random(rows, inner),
        "weight": random(outer, inner),
        "lora_a": random(rank, inner, dtype=adapter),
        "lora_b": random(outer, rank, dtype=adapter),
        **({"bias": random(outer)} if bias else {}),
    }


def ours(given, **options):
    return lora_linear(**given, backend="triton", **options)


def gradients(y, given, upstream=None):
    leaves = [given[name] for name in LEAVES if name in given and given[name].requires_grad]
    upstream = torch.linspace(-2, 3, y.numel()).view(y.shape) if upstream is None else upstream
    return torch.autograd.grad(y, leaves, upstream.to(y.dtype), retain_graph=True)


# In fp64 plain PyTorch would be the truth itself.
CASES = [case for case in OP.check_cases if case.dtype != torch.float64]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {str(c.dtype)[6:]}")
def test_values_and_gradients(case):
    assert values.examine(OP, Trial(case), "cpu") == ""


def test_is_a_linear_layer_and_its_adapter():
    given = make()
    x, weight, lora_a, lora_b, bias = given.values()
    torch.testing.assert_close(
        ours(given, scale=0.25), F.linear(x, weight + 0.25 * lora_b @ lora_a, bias)
    )


@pytest.mark.parametrize("inner", [12, 7])
def test_the_mask_is_that_of_dropout_and_the_layer_itself_drops_nothing(inner):
    x, eye = torch.randn(5, inner), torch.eye(inner)
    branch = lora_linear(x, 0 * eye, eye, eye, p=0.3, seed=SEED, backend="triton")
    torch.testing.assert_close(branch, dropout(x, 0.3, seed=SEED))
    whole = lora_linear(x, eye, eye, eye, p=0.3, seed=SEED, backend="triton")
    torch.testing.assert_close(whole, x + branch)


def test_the_backward_draws_the_mask_of_the_forward():
    x, eye = torch.randn(5, 12, requires_grad=True), torch.eye(12)
    lora_a = torch.eye(12, requires_grad=True)
    y = lora_linear(x, 0 * eye, lora_a, eye, scale=2.0, p=0.3, backend="triton")
    dy = torch.randn(5, 12)
    dx, da = torch.autograd.grad(y, (x, lora_a), dy)
    keep = y.detach() / x.detach() / 2.0  # of a seed that nobody knows
    torch.testing.assert_close(dx, 2.0 * keep * dy)
    torch.testing.assert_close(da, 2.0 * dy.t() @ (keep * x.detach()))
    assert (keep == 0).any() and (keep != 0).any()


def test_dropout_keeps_the_mean():
    x, eye = torch.ones(400, 64), torch.eye(64)
    y = lora_linear(x, 0 * eye, eye, eye, p=0.25, seed=SEED, backend="triton")
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs(y.mean() - 1.0) < 4 * (0.25 / 0.75 / y.numel()) ** 0.5


def test_torch_draws_the_seed():
    given = make()
    torch.manual_seed(3)
    one, other = ours(given, p=0.5), ours(given, p=0.5)
    torch.manual_seed(3)
    assert torch.equal(ours(given, p=0.5), one) and not torch.equal(one, other)


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.7, "training": False}])
def test_without_dropout_nothing_is_drawn(options):
    given, state = make(), torch.get_rng_state()
    y = ours(given, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(y, reference(**given))


def test_all_dropped_leaves_the_layer():
    given = make()
    y = ours(given, p=1.0)
    torch.testing.assert_close(y, F.linear(given["x"], given["weight"], given["bias"]))
    dx, _, da, db, _ = gradients(y, given)
    assert not da.any() and not db.any() and dx.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [6, 300])
def test_adapters_in_fp32_beside_16_bits_are_multiplied_in_fp32(dtype, rows):
    given = make(rows=rows, inner=40, dtype=dtype, adapter=torch.float32)
    y = ours(given, scale=2.0, p=0.3, seed=SEED)
    assert y.dtype == dtype
    found = dict(zip(LEAVES, gradients(y, given), strict=True))
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    upstream = torch.linspace(-2, 3, y.numel()).view(y.shape).to(dtype).double()
    truth = reference(**wide, scale=2.0, p=0.3, seed=SEED)
    expected = dict(zip(LEAVES, gradients(truth, wide, upstream), strict=True))
    for name in LEAVES:
        assert found[name].dtype == given[name].dtype
    for name in ("lora_a", "lora_b"):  # what was rounded to 16 bits on the way would show
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, name


def test_a_16_bit_sum_is_rounded_once():
    # 256 + 1 + 1 in bf16: each addition alone would be lost.
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    y = lora_linear(one, 256 * one, one, 2 * one, backend="triton")
    assert y.item() == 258


@pytest.mark.parametrize("trained", [(), *[(name,) for name in LEAVES], ("x", "lora_a"), LEAVES])
def test_gradients_of_every_subset(trained):
    given = make()
    everything = dict(zip(LEAVES, gradients(ours(given, p=0.3, seed=SEED), given), strict=True))
    for name, tensor in given.items():
        tensor.requires_grad_(name in trained)
    y = ours(given, p=0.3, seed=SEED)
    assert y.requires_grad == bool(trained)
    if trained:
        names = [name for name in LEAVES if name in trained]
        for name, gradient in zip(names, gradients(y, given), strict=True):
            torch.testing.assert_close(gradient, everything[name])


@pytest.mark.parametrize(
    "trained, kernels",
    [
        (("x", "lora_a", "lora_b"), ["down", "across", "across"]),
        (("lora_a", "lora_b"), ["down", "across", "across"]),
        (("x",), ["down", "up"]),
        (("lora_b",), ["across"]),
        (("weight", "bias"), []),
    ],
)
def test_a_backward_reads_only_for_the_gradients_needed(trained, kernels):
    given = make()
    for name, tensor in given.items():
        tensor.requires_grad_(name in trained)
    with launches() as forward:
        y = ours(given, p=0.3)
    assert [name for name, _ in forward] == ["_lora_down_kernel", "_lora_up_kernel"]
    with launches() as backward:
        y.sum().backward()
    assert [name for name, _ in backward] == [f"_lora_{kernel}_kernel" for kernel in kernels]


def test_no_dropped_x_and_no_mask_is_saved():
    given, saved = make(rows=50, inner=40, rank=2), []
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ours(given, p=0.3)
    inputs = {tensor.data_ptr() for tensor in given.values()}
    others = [tensor.numel() for tensor in saved if tensor.data_ptr() not in inputs]
    assert sorted(others) == [2, 50 * 2]  # the seed, and x times Aᵀ


LAYOUTS = {
    "transposed x": {"x": lambda t: t.t().contiguous().t()},
    "expanded x": {"x": lambda t: t[:1].expand(6, 10)},
    "3-D": {"x": lambda t: t.view(2, 3, 10).transpose(0, 1)},
    "every second column": {"x": lambda t: t.repeat_interleave(2, 1)[:, ::2]},
    "transposed weight": {"weight": lambda t: t.t().contiguous().t()},
    "weight with steps": {"weight": lambda t: t.repeat_interleave(2, 1)[:, ::2]},
    "transposed adapter": {name: lambda t: t.t().contiguous().t() for name in LEAVES[2:4]},
    "expanded adapter": {name: lambda t: t[:1].expand(t.shape) for name in LEAVES[2:4]},
    "bias with steps": {"bias": lambda t: t.repeat_interleave(2)[::2]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, layout):
    def lying_so(function):
        def call(**inputs):
            laid = {k: LAYOUTS[layout].get(k, lambda t: t)(t) for k, t in inputs.items()}
            return function(**laid, p=0.3, seed=SEED, scale=2.0)

        return call

    assert_right(OP, **make(), through=lying_so)


@pytest.mark.parametrize("upstream", [torch.ones(1, 1).expand(6, 7), torch.ones(7, 6).t()])
def test_upstream_gradients_of_any_layout(upstream):
    given = make()
    y = ours(given, p=0.3, seed=SEED)
    plain = gradients(y, given, torch.ones(6, 7))
    for one, other in zip(gradients(y, given, upstream), plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("parts", [(), ("wide",)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_sums_shared_by_programs_of_a_gpu(parts, p):
    itemsize = 4 if parts else 2
    assert down_config((150, 600, 3), itemsize, H200).num_pieces > 1
    assert across_config((150, 300, 3), itemsize, H200, False).num_pieces > 1
    assert across_config((150, 600, 3), itemsize, H200, True).num_pieces > 1
    with launched_as_on(H200):
        case = case_of(150, 600, 300, 3, parts=parts, p=p)
        assert values.examine(OP, Trial(case), "cpu") == ""


@pytest.mark.parametrize("rule", [down_config, up_config, across_config])
@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.arch != "sm_75"])
def test_every_piece_has_a_tile_and_every_stage_memory(rule, gpu):
    for shape in ((1, 1, 1), (16384, 4096, 16), (20001, 14336, 64), (7, 100_000, MAX_RANK)):
        for itemsize in (2, 4, 8):
            more = [False] if rule is across_config else []
            tile = rule(shape, itemsize, gpu, *more)
            along, block = (1, tile.block_n) if rule is down_config else (0, tile.block_m)
            tiles = -(-shape[along] // block)
            assert 1 <= tile.num_pieces <= tiles
            assert (tile.num_pieces - 1) * -(-tiles // tile.num_pieces) < tiles
            stage = (tile.block_m + MAX_RANK) * tile.block_n * itemsize
            assert tile.num_stages == 1 or shape[2] != MAX_RANK or (
                tile.num_stages * stage <= gpu.shared_bytes_per_block
            )  # fmt: skip


def test_no_rows():
    given = make(rows=0)
    y = ours(given, p=0.3)
    assert y.shape == (0, 7)
    found = gradients(y, given)
    assert [g.shape for g in found] == [given[name].shape for name in LEAVES]
    assert not any(g.any() for g in found)


def test_backward_twice_gives_the_same_and_a_second_derivative_raises():
    given = make()
    y = ours(given, p=0.3)
    for one, other in zip(gradients(y, given), gradients(y, given), strict=True):
        assert torch.equal(one, other)
    (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="lora_linear has no gradient of its gradient"):
        dx.sum().backward()


def test_gradcheck_in_fp64():
    given = make(rows=3, inner=5, outer=4, rank=2, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda *tensors: lora_linear(*tensors, scale=0.7, p=0.3, seed=SEED, backend="triton"),
        tuple(given.values()),
    )


@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32])
def test_opcheck(seed, adapter):
    given = make(dtype=torch.bfloat16, adapter=adapter)
    given["x"] = given["x"].detach().view(2, 3, 10).transpose(0, 1).requires_grad_()
    rest = (seed, 2.0, 0.3 if seed is not None else 0.0)
    torch.library.opcheck(FWD, (*given.values(), *rest))
    inputs = [tensor.detach() for tensor in given.values()]
    y, low = FWD(*inputs, *rest)
    for needs in ([True] * 5, [False, True, False, True, False]):
        torch.library.opcheck(BWD, (y, *inputs[:4], low, *rest, needs))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiles_once_for_all_row_counts(p):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(**given):
        return lora_linear(**given, p=p, seed=SEED, backend="triton").square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for rows in (5, 6, 8, 9):
        given = make(rows=rows)
        one, other = compiled(**given), loss(**given)
        assert one.equal(other)
        found, expected = (torch.autograd.grad(each, list(given.values())) for each in (one, other))
        for of_compiled, of_eager in zip(found, expected, strict=True):
            torch.testing.assert_close(of_compiled, of_eager)
    assert counter.frame_count <= 2  # static, then dynamic


def test_checkpoint_draws_the_same_mask():
    given = make()
    torch.manual_seed(5)
    plain = gradients(ours(given, p=0.5), given)
    torch.manual_seed(5)
    again = checkpoint(lambda: ours(given, p=0.5), use_reentrant=False)
    leaves = list(given.values())
    upstream = torch.linspace(-2, 3, 42).view(6, 7)
    for one, other in zip(torch.autograd.grad(again, leaves, upstream), plain, strict=True):
        assert torch.equal(one, other)


def test_autocast_casts_as_linear_does():
    given = make(adapter=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, plain = ours(given, scale=2.0), F.linear(given["x"], given["weight"])
    assert y.dtype == plain.dtype == torch.bfloat16
    half = {name: tensor.bfloat16() for name, tensor in given.items()}
    assert torch.equal(y, ours(half, scale=2.0))
    y.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in given.values())


def test_a_nan_that_is_dropped_stays_one():
    x, eye = torch.full((4, 8), torch.nan), torch.eye(8)
    lora_a = eye.clone().requires_grad_()
    y = lora_linear(x, 0 * eye, lora_a, eye, p=0.5, seed=SEED, backend="triton")
    (da,) = torch.autograd.grad(y, lora_a, torch.ones(4, 8))
    assert y.isnan().all() and da.isnan().all()


REFUSALS = {
    "rank": (ValueError, "rank 129", {"lora_a": torch.ones(129, 10), "lora_b": torch.ones(7, 129)}),
    "inner": (ValueError, r"lora_a has shape \(3, 9\)", {"lora_a": torch.ones(3, 9)}),
    "outer": (ValueError, r"lora_b .* must be \(7, 3\)", {"lora_b": torch.ones(8, 3)}),
    "x": (ValueError, r"x has shape \(6, 9\)", {"x": torch.ones(6, 9)}),
    "scalar": (ValueError, r"x has shape \(\)", {"x": torch.ones(())}),
    "bias": (ValueError, r"bias has shape \(6,\)", {"bias": torch.ones(6)}),
    "device": (ValueError, "on meta", {"lora_a": torch.ones(3, 10, device="meta")}),
    "3-D weight": (ValueError, "two dimensions", {"weight": torch.ones(1, 7, 10)}),
    "integers": (TypeError, "x is torch.int64", {"x": torch.ones(6, 10).long()}),
    "weight": (TypeError, "weight is torch.bfloat16", {"weight": torch.ones(7, 10).bfloat16()}),
    "narrow": (TypeError, "lora_a is torch.float16", {"lora_a": torch.ones(3, 10).half()}),
    "apart": (TypeError, "lora_b is torch.float64", {"lora_b": torch.ones(7, 3).double()}),
    "p": (ValueError, "p=1.5", {"p": 1.5}),
    "seed": (TypeError, "seed is int", {"seed": 3}),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what):
    error, message, changed = REFUSALS[what]
    with pytest.raises(error, match=message):
        ours(make() | changed)


def test_a_wider_rank_runs_in_plain_pytorch():
    given = make(rank=MAX_RANK + 1)
    assert torch.equal(lora_linear(**given), reference(**given))


def test_peer_is_the_layer_without_its_seed():
    inputs = OP.make_inputs(OP.check_cases[0], torch.device("cpu"), torch.Generator())
    torch.testing.assert_close(OP.peers["torch"]()(**inputs), reference(**inputs))


def test_cost_counts_products_and_each_tensor_once():
    with torch.device("meta"):
        x = torch.empty(4, 500, 64, dtype=torch.bfloat16)
        weight, lora_a = x.new_empty(96, 64), torch.empty(8, 64)
        lora_b, dy, low = torch.empty(96, 8), x.new_empty(4, 500, 96), torch.empty(2000, 8)
    layer, adapter = 2 * 2000 * 64 * 96, 2 * 2000 * 8 * (64 + 96)
    forward = formula_for("nearlight::lora_linear_fwd")((x, weight, lora_a, lora_b), {}, None)
    assert forward.flops == {"bf16": layer + adapter}
    assert forward.bytes == 2 * (2000 * (64 + 96) + 64 * 96) + 4 * 8 * (64 + 96)
    formula = formula_for("nearlight::lora_linear_bwd")
    given = (dy, x, weight, lora_a, lora_b, low, None, 1.0, 0.0)
    frozen = formula((*given, [True, False, True, True, False]), {}, None)
    assert frozen.flops == {"bf16": layer + 2 * adapter}
    assert frozen.bytes_written == 2 * 2000 * 64 + 4 * 8 * (64 + 96)
    trained = formula((*given, [True, True, True, True, True]), {}, None)
    assert trained.flops == {"bf16": 2 * layer + 2 * adapter}
    only_b = formula((*given, [False, False, False, True, False]), {}, None)
    assert only_b.flops == {"bf16": 2 * 2000 * 8 * 96}
    assert only_b.bytes_read == 2 * 2000 * 96


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        code = compile_for(build, arch)
        assert check_budget(build, code) == []
        if "up" not in build.name:
            # Tiles are added by the fp32 pipe: tensor cores cut off what it rounds.
            added = re.findall(r"fma\.rn\.f32", code.ptx)
            assert len(added) * 32 * build.num_warps >= build.constants["BLOCK_R"] * min(
                build.constants["BLOCK_M"], build.constants["BLOCK_N"]
            ), build


def test_turing_is_refused():
    with pytest.raises(ValueError, match="sm_80 or later"):
        OP.builds("sm_75")

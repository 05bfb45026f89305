from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from nearlight.core.cost import formula_for
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.core.numerics import judge
from nearlight.core.triton import compile_for
from nearlight.ops.cross_entropy import OP, cross_entropy, reference
from nearlight.ops.cross_entropy.function import STATS
from nearlight.ops.cross_entropy.launchers import candidates, config

LABELS = torch.tensor([1, -100, 3, 0, 14, -100, 7, 2])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(dtype: torch.dtype = torch.float32, vocab: int = 15) -> torch.Tensor:
    return (3 * random(8, vocab, dtype=dtype)).requires_grad_()


def ours(logits, labels=LABELS, **options):
    return cross_entropy(logits, labels, backend="triton", **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("has_class_weight", [False, True])
def test_is_torchs_cross_entropy(reduction, smoothing, has_class_weight):
    logits = make()
    weight = torch.rand(15) + 0.1 if has_class_weight else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    loss = ours(logits, class_weight=weight, **options)

    def torchs(dtype):
        given = None if weight is None else weight.to(dtype)
        return F.cross_entropy(logits.to(dtype), LABELS, given, **options)

    judgement = judge(loss, torchs(torch.float32), torchs(torch.float64))
    assert judgement.passed, judgement.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_of_half_logits_is_not_rounded_to_them(assert_right, dtype, reduction):
    result = assert_right(OP, make(dtype), LABELS, reduction=reduction)
    assert result.outputs[0].dtype == torch.float32


LAYOUTS = {
    "transposed": lambda x, y: (x.t().contiguous().t(), y),
    "batch second": lambda x, y: (x.view(2, 4, -1).transpose(0, 1), y.view(2, 4).t()),
    "shifted": lambda x, y: (x.view(2, 4, -1)[:, :-1], y.view(2, 4)[:, 1:]),
    "sliced columns": lambda x, y: (x[:, 1:-1], y.clamp_max(12)),
    "every second column": lambda x, y: (x[:, ::2], y.clamp_max(7)),
    "expanded": lambda x, y: (x[:1].expand(8, -1), y),
    "labels from the second on": lambda x, y: (x[:-1], y[1:]),
    "strided labels": lambda x, y: (x, y.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts(assert_right, layout, reduction):
    def lying_so(function):
        return lambda logits, labels, **options: function(
            *LAYOUTS[layout](logits, labels), **options
        )

    assert_right(OP, make(), LABELS, reduction=reduction, through=lying_so)


@pytest.mark.parametrize("vocab", [1025, 2049, 3001, 20_001])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_that_start_anywhere_in_the_tiles_of_a_gpu(assert_right, vocab, reduction):
    logits = random(5, vocab, dtype=torch.bfloat16).requires_grad_()
    labels = torch.tensor([0, vocab - 1, -100, 15, 16])
    with launched_as_on(find_gpu("h200")):
        assert_right(OP, logits, labels, reduction=reduction, stats=STATS)


# Narrower than what tiles of rows that start anywhere are moved by, and a little wider.
@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 8, 9, 15, 17, 31])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_of_few_classes_in_the_tiles_of_a_gpu(assert_right, vocab, dtype, reduction):
    logits = (30 * random(20, vocab, dtype=dtype)).requires_grad_()
    labels = torch.arange(20) % vocab
    labels[3] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "token_weight": random(20).abs()}
    with launched_as_on(find_gpu("h200")):
        assert_right(OP, logits, labels, reduction=reduction, stats=STATS, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("gpu", [None, find_gpu("h200")], ids=["interpreter", "h200"])
@pytest.mark.parametrize("inplace", [False, True])
def test_the_loss_of_a_single_class_is_zero_to_the_last_bit(dtype, gpu, inplace):
    logits = (30 * random(37, 1, dtype=dtype) + 10).requires_grad_()
    labels = torch.zeros(37, dtype=torch.int64)
    options = {"label_smoothing": 0.3, "token_weight": random(37), "stats": ("logsumexp",)}
    with launched_as_on(gpu) if gpu else nullcontext():
        given = logits * 1
        loss, log_sum_exp = ours(given, labels, reduction="sum", inplace=inplace, **options)
        loss.backward()
    assert loss == 0 and not logits.grad.any()
    if not inplace:  # else the gradient lies there now
        assert torch.equal(log_sum_exp, given[:, 0].to(log_sum_exp.dtype))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inplace", [False, True])
def test_evaluation_writes_nothing(mode, inplace):
    logits = make()
    before = logits.detach().clone()
    with mode():
        loss = ours(logits, inplace=inplace)
    assert not loss.requires_grad and torch.equal(logits, before)
    torch.testing.assert_close(loss, reference(logits, LABELS).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_twice_gives_the_same(reduction, dtype):
    logits = make(dtype)
    loss = ours(logits, reduction=reduction) * 0.5
    upstream = torch.linspace(0.5, 2, max(loss.numel(), 1)).view(loss.shape)
    first = torch.autograd.grad(loss, logits, upstream, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss, logits, upstream, retain_graph=True)[0].clone()
    third = torch.autograd.grad(loss, logits, upstream)[0]
    assert torch.equal(first, second) and torch.equal(first, third) and bool(first.any())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("factor", [0.5, 4.0, 0.0])
def test_loss_times_k_is_gradient_times_k(reduction, factor):
    logits = make()
    once, scaled = (
        torch.autograd.grad((ours(logits, reduction=reduction) * k).sum(), logits)[0]
        for k in (1.0, factor)
    )
    assert torch.equal(scaled, factor * once)  # powers of two round nothing


def test_two_losses_on_the_same_logits_see_them_unchanged():
    logits = make() * 1
    before = logits.detach().clone()
    leaf = logits.detach().requires_grad_()
    total = ours(leaf) + 1e-2 * leaf.logsumexp(-1).square().mean()
    total.backward()
    plain = before.clone().requires_grad_()
    (reference(plain, LABELS) + 1e-2 * plain.logsumexp(-1).square().mean()).backward()
    assert torch.equal(leaf, before)
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_in_place_leaves_the_gradient_in_the_logits_and_says_so():
    leaf = make()
    plain = torch.autograd.grad(reference(leaf * 2, LABELS) * 4, leaf)[0]
    logits = leaf * 2
    loss = ours(logits, inplace=True)
    (gradient,) = torch.autograd.grad(loss * 4, leaf)
    assert logits._version == 2  # the kernel's write and the scaling
    torch.testing.assert_close(gradient, plain)
    torch.testing.assert_close(logits.detach() * 2, plain)

    saved = leaf.exp()  # saves its own output, which the loss overwrites
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours(saved, inplace=True).backward()


@pytest.mark.parametrize(
    "given, options, reason",
    [
        (lambda: make() * 1, {"reduction": "none"}, "a loss per row"),
        (lambda: make(torch.float16) * 1, {}, "fp16"),
        (lambda: make(), {}, "a leaf"),
        (lambda: (make() * 1).t().contiguous().t(), {}, "not contiguous"),
    ],
)
def test_in_place_is_refused_where_it_cannot_be(given, options, reason):
    with pytest.raises(ValueError, match=reason):
        ours(given(), inplace=True, **options)


@pytest.mark.parametrize("token_weight", [None, torch.linspace(-2, 3, 8)])
def test_none_scales_each_row_by_its_own_upstream_gradient(assert_right, token_weight):
    upstream = torch.tensor([0.0, 1, 0, 1, 1, 0.5, 1, 2])
    options = {"reduction": "none", "upstream": upstream, "token_weight": token_weight}
    result = assert_right(OP, make(), LABELS, **options)
    zero = (result.gradients["logits"] == 0).all(1)
    assert zero.tolist() == [True, True, True, False, False, True, False, False]


@pytest.mark.parametrize("num_items", [5, 5.0, torch.tensor(5)])
def test_num_items_makes_micro_batches_add_up(num_items):
    logits, labels = make(), LABELS.clone()
    labels[0] = -100  # five remain
    whole = torch.autograd.grad(ours(logits, labels), logits)[0]
    parts = sum(
        ours(logits[rows], labels[rows], reduction="sum", num_items=num_items)
        for rows in (slice(0, 4), slice(4, 8))
    )
    torch.testing.assert_close(torch.autograd.grad(parts, logits)[0], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_one_finite_logit_far_into_the_row(dtype):
    logits = torch.full((2, 100_000), -torch.inf, dtype=dtype)
    logits[:, 50_000] = 1.0
    logits.requires_grad_()
    loss = ours(logits, torch.tensor([50_000, 50_000]))
    loss.backward()
    assert loss.item() == 0.0 and not logits.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored_and_nan_in_ignored_rows(reduction):
    logits = make()
    nan = logits.detach().clone()
    nan[LABELS == -100] = torch.nan
    nan.requires_grad_()
    one, other = (
        torch.autograd.grad(ours(x, reduction=reduction).sum(), x)[0] for x in (logits, nan)
    )
    assert torch.equal(one, other)
    loss = ours(nan, torch.full((8,), -100), reduction=reduction)
    (gradient,) = torch.autograd.grad(loss.sum(), nan)
    assert not loss.any() and not gradient.any()


@pytest.mark.parametrize("reduction, right", [("mean", ()), ("sum", ()), ("none", (0,))])
def test_no_rows(reduction, right):
    logits = torch.empty(0, 32, requires_grad=True)
    loss, entropy = ours(
        logits, torch.empty(0, dtype=torch.int64), reduction=reduction, stats=["entropy"]
    )
    loss.sum().backward()
    assert loss.shape == right and loss.sum() == 0
    assert logits.grad.shape == (0, 32) and entropy.shape == (0,)


@pytest.mark.parametrize("label", [15, -1, 2**40, -(2**63)])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_label_outside_is_an_error(label, backend):
    labels = LABELS.clone()
    labels[3] = label
    with pytest.raises(ValueError, match=rf"neither in \[0, 15\).*{label}"):
        cross_entropy(make(), labels, backend=backend)


def test_statistics():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 5.0, 5.0, 2.0], [9.0, 1.0, 1.0, 1.0]])
    labels = torch.tensor([3, 1, -100])
    _, *found = ours(logits, labels, stats=("correct", "argmax", "logsumexp", "entropy"))
    correct, argmax, log_sum_exp, entropy = found
    assert correct.tolist() == [False, True, False]
    assert argmax.tolist() == [0, 1, -1]
    rows = logits[:2].double()
    right = torch.cat([rows.logsumexp(-1), torch.zeros(1).double()])
    torch.testing.assert_close(log_sum_exp, right.float())
    entropies = torch.cat([torch.distributions.Categorical(logits=rows).entropy(), right[2:]])
    torch.testing.assert_close(entropy, entropies.float())
    assert not any(each.requires_grad for each in found)


def test_statistics_of_tiles_in_any_order(assert_right):
    # Maxima that rise and fall from tile to tile, equal ones, and −inf among them.
    logits = torch.linspace(-4, 4, 3001).sin().repeat(4, 1) * 7
    logits[1] = logits[1].flip(0)
    logits[2, :2999] = -torch.inf
    logits[3, ::7] = 9.0
    labels = torch.tensor([5, 2048, 3000, 7])
    with launched_as_on(find_gpu("h200")):
        assert_right(OP, logits.requires_grad_(), labels, stats=STATS)


def test_gradcheck():
    logits = make(torch.float64, 5)
    for options in ({}, {"reduction": "none", "softcap": 3.0, "label_smoothing": 0.1}):
        labels = LABELS.clamp_max(4)
        assert torch.autograd.gradcheck(lambda x, o=options, y=labels: ours(x, y, **o), logits)


def test_double_backward_raises():
    logits = make()
    (gradient,) = torch.autograd.grad(ours(logits * 1.0), logits, create_graph=False)
    assert gradient.any()
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(ours(logits * 1.0), logits, create_graph=True)


def test_compiled_without_a_graph_per_row_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for rows in (3, 5, 6, 8):
        logits = make()[:rows].detach().requires_grad_()
        loss = compiled(logits, LABELS[:rows])
        loss.backward()
        eager = ours(logits, LABELS[:rows])
        torch.testing.assert_close(loss, eager)
        torch.testing.assert_close(logits.grad, torch.autograd.grad(eager, logits)[0])
    assert counter.frame_count <= 2


def test_many_rows_share_the_sum_of_the_divisor():
    # More labels than one program of the divisor takes.
    labels = torch.arange(70_000) % 3
    labels[::5] = -100
    logits, weight = random(70_000, 3), torch.rand(70_000)
    loss = ours(logits, labels, token_weight=weight)
    torch.testing.assert_close(loss, reference(logits, labels, token_weight=weight))


def test_refusals():
    logits = make()
    for options, reason in (
        ({"reduction": "all"}, "mean, sum, none"),
        ({"label_smoothing": 1.5}, "0 to 1"),
        ({"stats": ["accuracy"]}, "logsumexp, argmax, correct, entropy"),
        ({"class_weight": torch.ones(3)}, "must be"),
        ({"token_weight": torch.ones(8, requires_grad=True)}, "without a gradient"),
    ):
        with pytest.raises(ValueError, match=reason):
            ours(logits, **options)
    with pytest.raises(TypeError, match=r"use labels.long\(\)"):
        ours(logits, LABELS.int())
    with pytest.raises(TypeError, match="allowed are"):
        ours(logits.long())
    with pytest.raises(ValueError, match="V ≥ 1"):
        ours(torch.empty(8, 0))


def test_a_call_reads_the_logits_once_and_writes_their_gradient_once():
    cost = OP.cost(OP.cases[0])["forward_backward"]
    assert cost.bytes == 2 * 8192 * 32_000 * 2 + 8192 * 8 + 4
    logits, scale = torch.empty(4, 8), formula_for("nearlight::cross_entropy_scale_")
    assert scale((logits, torch.ones(())), {}, None).bytes == 4


@pytest.mark.parametrize("vocab", [32_000, 50_257, 128_256])
def test_loads_and_stores_are_16_bytes_wide_and_hinted(vocab):
    builds = [
        build
        for build in OP.builds("sm_90a")
        if build.constants.get("BLOCK_R") == 8 and build.constants["ALIGNS"] == (vocab % 16 != 0)
    ]
    assert builds
    for build in builds:
        ptx = compile_for(build, "sm_90a").ptx.splitlines()
        loads, stores = ([line for line in ptx if f"{way}.global" in line] for way in ("ld", "st"))
        wide = [line for line in loads if ".v4.b32" in line]
        assert len(wide) >= 16 and all("evict" in line for line in wide)
        assert sum(".v4.b32" in line for line in stores) >= 8
        if vocab % 16 == 0:  # else the ends of a row are written element by element
            assert not any(".b16" in line for line in stores)
            assert sum(".b16" in line for line in loads) <= 2  # of the label, in two layouts


def test_config_is_one_of_few_large_programs_where_rows_are_wide():
    h200 = find_gpu("h200")
    wide = config((8192, 128_256), torch.bfloat16, h200, False, True)
    narrow = config((8192, 32_000), torch.bfloat16, h200, False, True)
    once = config((8192, 128_256), torch.bfloat16, h200, False, False)
    assert (wide.num_warps, narrow.num_warps, once.num_warps) == (16, 8, 8)
    assert (wide.block_r, narrow.block_r, once.block_r) == (8, 8, 4)
    assert config((8192, 3), torch.bfloat16, h200, False, True).block_c == 4
    found = candidates((8192, 128_256), torch.bfloat16, h200, False, True)
    assert wide in found and len(found) > 40
    assert candidates((8, 8), torch.float32, None, True, True) == {}

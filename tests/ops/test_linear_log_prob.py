from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from nearlight.core.cost import formula_for
from nearlight.core.numerics import judge
from nearlight.ops.linear_log_prob import OP, linear_log_prob, reference
from nearlight.workbench.properties import values
from nearlight.workbench.trial import Trial, flatten

FWD = torch.ops.nearlight.linear_log_prob_fwd.default
BWD = torch.ops.nearlight.linear_log_prob_bwd.default
LEAVES = ("x", "weight", "bias")


def make(rows=8, hidden=6, vocab=15, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_(),
        "labels": torch.randint(vocab, (rows,), generator=generator),
    }


def triton(given, **options):
    return linear_log_prob(**given, backend="triton", **options)


def gradients(outputs, given, upstream):
    leaves = [given[name] for name in LEAVES if name in given and given[name].requires_grad]
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


# In fp64 plain PyTorch would be the truth itself.
CASES = [case for case in OP.check_cases if case.dtype != torch.float64]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {str(c.dtype)[6:]}")
def test_values_and_gradients(case):
    # One draw in some exceeds the rule by a little; the check draws again, by the same rule.
    assert values.examine(OP, Trial(case), "cpu") == ""
    inputs = OP.make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert all(output.dtype == torch.float32 for output in flatten(triton(inputs)))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_is_the_distribution_that_temperature_and_softcap_make(softcap):
    # As a model that caps its logits is sampled: the temperature divides what was capped.
    given = make()
    options = {"softcap": softcap, "logit_scale": 0.7, "temperature": 0.5}
    outputs = triton(given, return_entropy=True, **options)

    def torchs(dtype):
        logits = 0.7 * given["x"].to(dtype) @ given["weight"].to(dtype).t()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        distribution = Categorical(logits=logits / 0.5)
        return distribution.log_prob(given["labels"]), distribution.entropy()

    for ours, plain, truth in zip(
        outputs, torchs(torch.float32), torchs(torch.float64), strict=True
    ):
        judgement = judge(ours, plain, truth)
        assert judgement.passed, judgement.reason


def test_the_entropys_gradient_is_its_formula():
    given = make(dtype=torch.float64)
    entropy = triton(given, return_entropy=True)[1]
    p = (given["x"] @ given["weight"].t()).softmax(-1).detach()
    of_logits = -p * (p.log() + entropy.detach()[:, None])
    grad_x, grad_weight = gradients([entropy], given, [torch.ones(8, dtype=torch.float64)])
    torch.testing.assert_close(grad_x, of_logits @ given["weight"].detach())
    torch.testing.assert_close(grad_weight, of_logits.t() @ given["x"].detach())


def test_a_sure_row_keeps_its_digits():
    # p(label) = 1 − 3e−6 beside an offset: 1 − p alone would be left with one digit.
    given = make(rows=1, hidden=2, vocab=4)
    given["x"] = torch.tensor([[100.0, 14.0]], requires_grad=True)
    given["weight"] = torch.tensor([[1.0, 0], [1, 1], [1, 0], [1, 0]], requires_grad=True)
    given["labels"] = torch.tensor([1])
    upstream = [torch.tensor([2.0]), torch.tensor([0.5])]
    outputs = triton(given, return_entropy=True)
    wide = {k: v.detach().double().requires_grad_() for k, v in given.items() if k != "labels"}
    wide["labels"] = given["labels"]
    truths = reference(**wide, return_entropy=True)
    found = [*outputs, gradients(outputs, given, upstream)[1]]
    truths = [*truths, gradients(truths, wide, [g.double() for g in upstream])[1]]
    for ours, truth in zip(found, truths, strict=True):
        # Held to the truth rounded once, for torch in fp32 has lost its digits itself.
        torch.testing.assert_close(ours, truth.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_each_output_may_be_used_alone(used):
    given = make(rows=9)
    given["labels"][4] = -100
    upstream = [torch.linspace(-2, 3, 9), torch.linspace(1, -4, 9)]
    ours, plain = triton(given, return_entropy=True), reference(**given, return_entropy=True)
    found, expected = (
        gradients([each[i] for i in used], given, [upstream[i] for i in used])
        for each in (ours, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("upstream", [torch.ones(1).expand(8), torch.ones(16)[::2]])
def test_upstream_gradients_of_stride_0_and_of_views(upstream):
    given = make()
    outputs = triton(given, return_entropy=True)
    plain = gradients(outputs, given, [torch.ones(8)] * 2)
    outputs = triton(given, return_entropy=True)
    for ours, expected in zip(gradients(outputs, given, [upstream] * 2), plain, strict=True):
        assert ours.equal(expected)


def test_each_row_takes_its_own_upstream_gradient():
    # Liger 968: all rows took grad_output[0], and with that 0 nothing was learned.
    given = make()
    upstream = torch.tensor([0.0, 1, 0, 1, 1, 0.5, 1, -2])
    (grad_x,) = torch.autograd.grad(triton(given), given["x"], upstream)
    (ones,) = torch.autograd.grad(triton(given), given["x"], torch.ones(8))
    torch.testing.assert_close(grad_x, upstream[:, None] * ones)


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("bias",), ("x", "weight")])
def test_gradients_of_every_subset(assert_right, frozen):
    # H2: with x frozen the head's gradient went missing.
    given = {**make(hidden=16, vocab=32), "bias": torch.randn(32, requires_grad=True)}
    for name in frozen:
        given[name].requires_grad_(False)
    found = assert_right(OP, **given, return_entropy=True).gradients
    assert found.keys() == {*LEAVES} - {*frozen}


LAYOUTS = {
    "transposed x": lambda x, w, y: (x.t().contiguous().t(), w, y),
    "expanded x": lambda x, w, y: (x[:1].expand(8, 6), w, y),
    "3-D": lambda x, w, y: (x.view(2, 4, 6).transpose(0, 1), w, y.view(2, 4).transpose(0, 1)),
    "shifted": lambda x, w, y: (x.view(2, 4, 6)[:, :-1], w, y.view(2, 4)[:, 1:]),
    "transposed weight": lambda x, w, y: (x, w.t().contiguous().t(), y),
    "every second weight": lambda x, w, y: (x, w[::2], y % 8),
    "one label expanded": lambda x, w, y: (x, w, y[:1].expand(8)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(assert_right, layout):
    def lying_so(function):
        return lambda x, weight, labels, **options: function(
            *LAYOUTS[layout](x, weight, labels), **options
        )

    assert_right(OP, **make(), return_entropy=True, through=lying_so)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_classes_at_minus_infinity(backend):
    # H12: with the first block all −inf, four libraries answer NaN.
    given = make(rows=2, hidden=2, vocab=40_000)
    bias = torch.full((40_000,), -torch.inf)
    bias[[33_000, 39_999]] = 0.0
    given |= {"bias": bias.requires_grad_(), "labels": torch.tensor([33_000, 7])}
    outputs = linear_log_prob(**given, return_entropy=True, backend=backend)
    log_prob, entropy = outputs
    assert log_prob[0].isfinite() and log_prob[1] == -torch.inf and entropy.isfinite().all()
    found = gradients(outputs, given, [torch.ones(2)] * 2)
    assert all(gradient.isfinite().all() for gradient in found)
    assert (found[2][8:33_000] == 0).all() and found[2][7] == 1


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_all_ignored_and_nothing_there_give_zeros(backend):
    for rows in (4, 0):
        given = {**make(rows=rows), "bias": torch.randn(15, requires_grad=True)}
        given["labels"] = torch.full((rows,), -100)
        outputs = linear_log_prob(**given, return_entropy=True, backend=backend)
        assert all(output.shape == (rows,) and (output == 0).all() for output in outputs)
        for gradient in gradients(outputs, given, [torch.ones(rows)] * 2):
            assert (gradient == 0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nan_in_an_ignored_row_and_its_upstream_gradient_reach_nobody(backend):
    given, upstream = make(), torch.linspace(-1, 1, 8)
    given["labels"][2] = -100
    options = {"return_entropy": True, "backend": backend}
    clean = linear_log_prob(**given, **options)
    expected = torch.autograd.grad(clean, given["x"], [upstream] * 2)
    with torch.no_grad():
        given["x"][2] = torch.nan
    outputs = linear_log_prob(**given, **options)
    if backend == "triton":  # plain PyTorch multiplies it by 0
        upstream = torch.where(torch.arange(8) == 2, torch.nan, upstream)
    found = torch.autograd.grad(outputs, given["x"], [upstream] * 2)
    for one, other in zip((*outputs, *found), (*clean, *expected), strict=True):
        assert one.equal(other)


def test_nan_logits_are_nan():
    given = make()
    with torch.no_grad():
        given["weight"][3] = torch.nan
    assert all(output.isnan().all() for output in triton(given, return_entropy=True))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("label", [15, 60, -1, -101])
def test_labels_outside_are_an_error(label, backend):
    # H14: flash-attention and fla answer 0.
    given = make()
    given["labels"][3] = label
    with pytest.raises(ValueError, match=rf"\[0, 15\).*{label}"):
        linear_log_prob(**given, backend=backend)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0.0}, "temperature=0.0: allowed are numbers above 0"),
        ({"softcap": -1.0}, "softcap=-1.0: allowed are numbers above 0"),
        ({"memory_budget_bytes": 0}, "allowed is 1 and more"),
        ({"backend": "cuda"}, "auto, triton, reference"),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        linear_log_prob(**make(), **options)


def test_messages_name_this_op():
    with pytest.raises(ValueError, match=r"linear_log_prob: weight is \(15, 7\)"):
        linear_log_prob(**{**make(), "weight": torch.ones(15, 7)})


@pytest.mark.parametrize("rows", [640, 1001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_budget_too_small_says_the_least_that_works(assert_right, rows, dtype):
    # Said by the forward, though only the backward needs so much.
    given = make(rows=rows, vocab=100, dtype=dtype)
    with pytest.raises(ValueError, match="allowed are") as caught:
        triton(given, memory_budget_bytes=1000)
    least = int(str(caught.value).split("allowed are ")[1].split()[0])
    assert_right(OP, **given, return_entropy=True, memory_budget_bytes=least)
    with pytest.raises(ValueError, match=f"allowed are {least}"):
        triton(given, memory_budget_bytes=least - 1)


def test_no_logits_are_saved_and_inputs_stay():
    given = make(rows=64, hidden=4, vocab=300)
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    saved = []
    with saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        outputs = triton(given, return_entropy=True)
    assert max(saved) <= 300 * 4
    sum(output.sum() for output in outputs).backward()
    for name, tensor in given.items():
        assert tensor.detach().equal(before[name])


def test_what_the_caller_does_to_the_outputs_in_place_reaches_no_gradient():
    given = make()
    log_prob, entropy = triton(given, return_entropy=True)
    expected = gradients([log_prob, entropy], given, [torch.ones(8)] * 2)
    log_prob, entropy = triton(given, return_entropy=True)
    found = gradients([log_prob.mul_(1.0), entropy.add_(7.0)], given, [torch.ones(8)] * 2)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_no_graph(mode):
    given = make()
    with mode():
        log_prob = triton(given)
    assert not log_prob.requires_grad
    torch.testing.assert_close(log_prob, reference(**given).detach())


def test_backward_twice_gives_the_same_and_a_second_derivative_raises():
    given = make()
    outputs = triton(given, return_entropy=True)
    total = sum(output.sum() for output in outputs)
    leaves = given["x"], given["weight"]
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    for one, other in zip(
        first, torch.autograd.grad(total, leaves, retain_graph=True), strict=True
    ):
        assert one.equal(other)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(total, leaves, create_graph=True)


def test_gradcheck_in_fp64():
    given = make(rows=4, vocab=7, dtype=torch.float64)
    given["labels"][1] = -100
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    options = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3, "return_entropy": True}
    torch.autograd.gradcheck(
        lambda x, w, b: linear_log_prob(x, w, given["labels"], b, backend="triton", **options),
        (given["x"], given["weight"], bias),
    )


@pytest.mark.parametrize("return_entropy", [False, True])
def test_opcheck(return_entropy):
    given = make(rows=5)
    rest = (None, -100, 3.0, 0.7, 0.9, return_entropy, None, True, True, False)
    torch.library.opcheck(FWD, (*given.values(), *rest))
    inputs = [tensor.detach() for tensor in given.values()]
    statistics = FWD(*inputs, *rest)[2]
    entropy = torch.ones(5) if return_entropy else None
    torch.library.opcheck(BWD, (torch.ones(5), entropy, statistics, *inputs, *rest))


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiles_once_for_all_row_counts(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def loss(x, weight, labels):
        log_prob, entropy = linear_log_prob(
            2.0 * x, weight, labels, return_entropy=True, backend="triton"
        )
        return (log_prob - 0.5 * entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for rows in (5, 6, 7, 9):
        given = make(rows=rows)
        leaves = given["x"], given["weight"]
        ours, eager = compiled(**given), loss(**given)
        assert ours.equal(eager)
        for one, other in zip(
            torch.autograd.grad(ours, leaves), torch.autograd.grad(eager, leaves), strict=True
        ):
            assert one.equal(other)
    assert counter.frame_count <= 2  # static, then dynamic


def test_checkpoint_gives_the_same():
    given = make()
    plain = torch.autograd.grad(triton(given).sum(), given["weight"])
    again = checkpoint(
        lambda x, w: linear_log_prob(x, w, given["labels"], backend="triton"),
        given["x"],
        given["weight"],
        use_reentrant=False,
    )
    assert torch.autograd.grad(again.sum(), given["weight"])[0].equal(plain[0])


def test_autocast_casts_as_linear_does():
    given = make()
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = triton(given), reference(**given)
    torch.testing.assert_close(ours, plain)
    ours.sum().backward()
    assert given["x"].grad.dtype == torch.float32


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_products_only_for_the_gradients_needed(needs, monkeypatch):
    calls, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (calls.append(1), mm(*a, **k))[1])
    given = make()
    for name, is_needed in zip(LEAVES, needs, strict=False):
        given[name].requires_grad_(is_needed)
    log_prob = triton(given)
    assert len(calls) == 1
    log_prob.sum().backward()
    assert len(calls) == 2 + sum(needs)


def test_forward_and_backward_take_the_same_chunks(monkeypatch):
    # Else the products of the backward would round differently from those of the statistics.
    shapes, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: (shapes.append(a.shape), mm(a, b, **k))[1])
    given = make(rows=1001, vocab=100, dtype=torch.bfloat16)
    log_prob = triton(given, memory_budget_bytes=128 * 128 * 2 + 100 * 6 * 5)
    num_chunks = len(shapes)
    assert num_chunks == 8
    log_prob.sum().backward()
    of_logits = [shape for shape in shapes[num_chunks:] if shape[1] == 6]
    assert of_logits == shapes[:num_chunks]


def test_cost_counts_products_bytes_and_the_workspace():
    with torch.device("meta"):
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
        weight = torch.empty(128_256, 4096, dtype=torch.bfloat16)
        labels, row = torch.empty(8192, dtype=torch.int64), torch.empty(8192)
    given = (x, weight, labels, None, -100, None, 1.0, 1.0, False, None, True, True, False)
    one = 2 * 8192 * 4096 * 128_256
    matrices = (8192 + 128_256) * 4096 * 2
    forward = formula_for("nearlight::linear_log_prob_fwd")(given, {}, None)
    backward = formula_for("nearlight::linear_log_prob_bwd")((row, None, row, *given), {}, None)
    assert (forward.flops, backward.flops) == ({"bf16": one}, {"bf16": 3 * one})
    assert (forward.bytes_written, backward.bytes_written) == (0, matrices)
    for cost in (forward, backward):
        assert cost.bytes_read == matrices + 8192 * 8
        assert 0 < cost.workspace_bytes - 2048 * 128_256 * 2 <= 8192 * 64

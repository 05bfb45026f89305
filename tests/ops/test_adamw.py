"""AdamW: torch's numbers, every layout and dtype in one launch, eight bits, rounding, refusals."""

import math

import pytest
import torch

from nearlight.core.blockwise import BLOCK, pack, unpack
from nearlight.core.hardware import find_gpu
from nearlight.core.launch import launched_as_on
from nearlight.ops import adamw
from nearlight.ops.adamw import config, registration
from nearlight.ops.adamw.kernels import candidates
from nearlight.workbench.launches import launches

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def made(dtype=SINGLE, shape=(5, 7), grad_dtype=None, seed=0, is_narrow=False, step=3.0):
    """Return parameter, gradient, moments and step of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = DOUBLE if dtype == DOUBLE else SINGLE

    def random(scale=1.0):
        return scale * torch.randn(shape, generator=generator, dtype=wide)

    moments = [random(0.1), random(0.1).square()]
    if is_narrow:
        moments = [pack(moments[0].flatten(), True), pack(moments[1].flatten(), False)]
    return random().to(dtype), random().to(grad_dtype or dtype), *moments, torch.tensor(step)


def lists(*tensors):
    return [list(column) for column in zip(*tensors, strict=True)]


def both(inputs, **options):
    """Return what the kernel and what the reference give, out of place."""
    return (
        [x for part in adamw(*inputs, in_place=False, backend=backend, **options) for x in part]
        for backend in ("triton", "reference")
    )


def assert_near(ours, theirs):
    """Hold results to a rounding; of eight bits, codes to one step in few places, and scales."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype != torch.uint8:
        eps = torch.finfo(ours.dtype).eps
        return torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=2 * eps)
    num_codes = ours.numel() // (BLOCK + 4) * BLOCK
    apart = (ours[:num_codes].int() - theirs[:num_codes].int()).abs()
    assert apart.max() <= 1 and apart.double().mean() < 1e-3
    scales = (x[num_codes:].clone().view(torch.float32) for x in (ours, theirs))
    return torch.testing.assert_close(*scales, rtol=3e-7, atol=0)


def test_the_first_step_moves_by_the_learning_rate():
    p, g, m, v = torch.ones(3), torch.tensor([2.0, -3.0, 1e-3]), torch.zeros(3), torch.zeros(3)
    adamw([p], [g], [m], [v], [torch.tensor(1.0)], lr=0.25, weight_decay=0.0, backend="triton")
    torch.testing.assert_close(p, torch.tensor([0.75, 1.25, 0.75]), rtol=1e-4, atol=0)
    torch.testing.assert_close(m, 0.1 * g)
    torch.testing.assert_close(v, 0.001 * g * g, rtol=1e-4, atol=0)


@pytest.mark.parametrize("step", [1.0, 2.0, 100.0, 693.0, 1e5])
def test_torchs_fused_step_in_fp64_gives_the_same_bits_but_for_the_last(step):
    p, g, m, v, t = made(DOUBLE, (33, 5), step=step)
    ours = adamw([p], [g], [m], [v], [t], in_place=False, backend="triton", weight_decay=0.3)
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [t], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.3, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    for one, two in zip((x for part in ours for x in part), (p, m, v), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-15, atol=1e-16)


MIXED = [
    ((SINGLE, (5, 7)), {}),
    ((HALF, (300,)), {}),
    ((HALF, (3, 1)), {"grad_dtype": SINGLE}),
    ((torch.float16, (1,)), {}),
    ((torch.float16, (65,)), {"grad_dtype": SINGLE}),
    ((SINGLE, (0, 4)), {}),
    ((DOUBLE, (4, 4)), {}),
    ((SINGLE, (70, 100)), {"is_narrow": True}),
    ((HALF, (513,)), {"is_narrow": True}),
]


@pytest.mark.parametrize("options", [{}, {"maximize": True, "grad_scale": torch.tensor(4.0)}])
def test_a_list_of_every_kind_is_one_launch_and_right(options):
    inputs = lists(*(made(*a, seed=i, **k) for i, (a, k) in enumerate(MIXED)))
    with launches() as seen:
        ours, theirs = both(inputs, **options)
    assert len(seen) == 1
    for one, two in zip(ours, theirs, strict=True):
        assert_near(one, two)


def test_in_place_and_out_of_place_agree_and_writes_are_counted():
    inputs = lists(*(made(*a, seed=i, **k) for i, (a, k) in enumerate(MIXED)))
    kept = [tensor.clone() for tensor in inputs[1]]
    new = adamw(*inputs, in_place=False, backend="triton")
    before = inputs[0][0]._version
    given = adamw(*inputs, backend="triton")
    assert inputs[0][0]._version > before
    assert all(map(torch.equal, kept, inputs[1]))
    for ours, theirs, place in zip(given, new, (0, 2, 3), strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert all(one is two for one, two in zip(ours, inputs[place], strict=True))


def test_two_thousand_tensors_are_one_launch():
    inputs = lists(*(made(shape=(index % 3,), seed=index) for index in range(2000)))
    with launches() as seen, launched_as_on(find_gpu("h200")):
        adamw(*inputs, backend="triton", in_place=False)
    assert len(seen) == 1


@pytest.mark.parametrize("numel", [2047, 2048, 8191, 8193, 20000])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_tensors_of_several_chunks_on_a_gpu(numel, is_narrow):
    inputs = lists(*(made(shape=(n,), is_narrow=is_narrow) for n in (5, numel, 3)))
    with launched_as_on(find_gpu("h200")):
        ours, theirs = both(inputs)
    for one, two in zip(ours, theirs, strict=True):
        assert_near(one, two)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.nn.functional.pad(x, (1, 0))[:, 1:],
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ],
)
def test_parameters_in_any_layout_are_written_where_they_lie(view, is_narrow):
    p, g, m, v, t = made(shape=(17, 33), is_narrow=is_narrow)
    param, other = view(p), view(p)
    with torch.no_grad():
        adamw([param], [g], [m.clone()], [v.clone()], [t], backend="triton")
        adamw([other], [g], [m.clone()], [v.clone()], [t], backend="reference")
    torch.testing.assert_close(param, other, rtol=3e-7, atol=3e-7)
    assert not torch.equal(param, p) and param.stride() == view(p).stride()


def test_infinite_and_nan_gradients_do_what_they_do_in_torch():
    p, _, m, v, t = made(shape=(4,))
    g = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    theirs = [x.clone() for x in (p, m, v)]
    for _ in range(2):
        adamw([p], [g], [m], [v], [t], backend="triton")
        torch._fused_adamw_(
            [theirs[0]], [g], [theirs[1]], [theirs[2]], [], [t], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        g = torch.ones(4)
    for one, two in zip((p, m, v), theirs, strict=True):
        torch.testing.assert_close(one, two, equal_nan=True)


def test_a_nan_spoils_its_block_of_eight_bits_and_no_other():
    p, g, m, v, t = made(shape=(3 * BLOCK,), is_narrow=True)
    g[BLOCK + 3] = math.nan
    _, (m,), (v,) = adamw([p], [g], [m], [v], [t], in_place=False, backend="triton")
    for state, is_signed in ((m, True), (v, False)):
        is_finite = unpack(state, 3 * BLOCK, is_signed).isfinite().view(3, BLOCK)
        assert is_finite[0].all() and is_finite[2].all() and not is_finite[1].any()


def test_stochastic_rounding_is_unbiased_and_follows_seed_and_step():
    p = torch.full((1 << 16,), 1.0, dtype=HALF)
    g, m, v = torch.ones_like(p), torch.zeros(p.shape), torch.zeros(p.shape)
    options = {"lr": 2.0**-10, "weight_decay": 0.0, "in_place": False, "backend": "triton"}

    def rounded(seed, step=1.0):
        # Moments that make the step the learning rate, whatever the count.
        m_old, v_old = (torch.ones_like(m), torch.ones_like(v)) if step > 1 else (m, v)
        return adamw([p], [g], [m_old], [v_old], [torch.tensor(step)], seed=seed, **options)[0][0]

    first = rounded(7)
    # A quarter of the way to the next number below 1, which is 2^-8 away.
    share = float((first < 1).double().mean())
    assert abs(share - 0.25) < 0.01 and set(first.unique().tolist()) == {1.0, 1 - 2.0**-8}
    assert torch.equal(first, rounded(7))
    for other in (rounded(8), rounded(7 + (1 << 40)), rounded(7, step=1e6)):
        agreed = float((other == first).double().mean())
        assert abs(agreed - (0.25**2 + 0.75**2)) < 0.02
    reference = adamw([p], [g], [m], [v], [torch.tensor(1.0)], seed=7,
                      **{**options, "backend": "reference"})[0][0]  # fmt: skip
    assert float((first == reference).double().mean()) > 0.999


def test_a_table_is_built_once_and_again_when_a_pointer_moves():
    inputs = lists(made(), made(seed=1))
    registration._tables.clear()
    for _ in range(3):
        adamw(*inputs, backend="triton")
    assert len(registration._tables) == 1
    inputs[1] = [gradient.clone() for gradient in inputs[1]]
    ours, theirs = both(inputs)
    torch.testing.assert_close(ours[0], theirs[0])
    adamw(*inputs, backend="triton")
    assert len(registration._tables) == 3
    for index in range(registration.MAX_TABLES + 1):
        adamw(*lists(made(shape=(index + 1,))), backend="triton")
    assert len(registration._tables) == registration.MAX_TABLES


def test_the_op_that_writes_in_place_passes_torchs_check():
    inputs = lists(made(), made(HALF, (3,)))
    rest = (None, None, None, 1e-3, 0.9, 0.999, 1e-8, 1e-2, False, None)
    torch.library.opcheck(torch.ops.nearlight.adamw_.default, (*inputs, *rest))


@pytest.mark.slow
def test_a_compiled_step_in_place_is_the_same():
    inputs, others = lists(made(), made(seed=1)), lists(made(), made(seed=1))

    def step(params, grads, exp_avgs, exp_avg_sqs, steps):
        adamw(params, grads, exp_avgs, exp_avg_sqs, steps, backend="triton")

    torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    step(*others)
    for ours, theirs in zip(inputs, others, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_the_config_fits_what_it_is_for():
    gpu = find_gpu("h200")
    for kinds in (1, 2, 1 << 8):
        rule = config(kinds, gpu)
        assert rule.chunk == rule.lines * rule.tiles * BLOCK
        assert set(candidates(kinds, gpu).values()) == {""}
    assert candidates(1, None) == {}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x[1].pop(), ValueError, "equally long"),
        (lambda x: x[1].__setitem__(0, x[1][0].double()), TypeError, "fp32"),
        (lambda x: x[2].__setitem__(0, x[2][0].bfloat16()), TypeError, "exp_avgs"),
        (lambda x: x[1].__setitem__(0, x[1][0].t()), ValueError, "shape"),
        (lambda x: x[4].__setitem__(0, torch.ones(2)), ValueError, "allowed is one"),
        (lambda x: x[0].__setitem__(0, x[0][0][:1].expand(5, 7)), ValueError, "in_place=False"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change, error, words):
    inputs = lists(made())
    change(inputs)
    with pytest.raises(error, match=words):
        adamw(*inputs)

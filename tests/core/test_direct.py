"""Ops are called past torch's dispatcher only where nothing but the kernel would come of it."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nearlight.core.cost import Cost
from nearlight.core.direct import direct
from nearlight.core.register import register_op


def _scaled(x, weight, factor, power):
    y = x * factor**power
    return y if weight is None else y * weight


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2] ** inputs[3]


def _differentiate(ctx, dy):
    x, weight = ctx.saved_tensors
    dx = dy * ctx.scale * (1 if weight is None else weight)
    return dx, None if weight is None else dy * ctx.scale * x, None, None


_SCHEMA = "nearlight_test_direct::scaled(Tensor x, Tensor? weight, float factor, int power)"
scaled = register_op(
    f"{_SCHEMA} -> Tensor",
    _scaled,
    fake=lambda x, *rest: torch.empty_like(x),
    cost=lambda *_: Cost(),
    backward=_differentiate,
    save=_save,
)
OVERLOAD = torch.ops.nearlight_test_direct.scaled.default


class Spied:
    """Stands for the op and notes its calls."""

    _schema = OVERLOAD._schema

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return OVERLOAD(*args, **kwargs)


@pytest.fixture
def spied():
    return Spied()


@pytest.fixture
def call(spied):
    return direct(spied, _scaled, _differentiate, _save)


@pytest.mark.parametrize("x_needs", [True, False])
@pytest.mark.parametrize("weight_needs", [True, False, None])
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_both_ways_give_the_same(spied, call, x_needs, weight_needs, kind):
    def results(op):
        generator = torch.Generator().manual_seed(0)
        x = kind(torch.randn(3, 4, generator=generator)).requires_grad_(x_needs)
        weight = None
        if weight_needs is not None:
            weight = kind(torch.randn(4, generator=generator)).requires_grad_(weight_needs)
        y = op(x, weight, 1.5, 2)
        given = [each for each in (x, weight) if each is not None and each.requires_grad]
        gradients = torch.autograd.grad(y.square().sum(), given) if given else []
        return y, y.requires_grad, gradients

    y, needs, gradients = results(call)
    assert spied.calls == 0
    right, right_needs, right_gradients = results(OVERLOAD)
    assert torch.equal(y, right) and needs == right_needs
    assert len(gradients) == len(right_gradients)
    assert all(map(torch.equal, gradients, right_gradients))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Overridden(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    pass


def _run(op, x):
    return op(x, None, 2.0, 1)


def _in(context):
    def run(op):
        x = torch.ones(3)
        with context():
            _run(op, x)

    return run


def _dual(op):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        _run(op, x)


def _traced(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still there
        torch.jit.trace(lambda x: _run(op, x), (torch.ones(3),), check_trace=False)


LOOKED_ON = {
    "a dispatch mode": _in(_Dispatched),
    "a function mode": _in(_Overridden),
    "a default device": _in(lambda: torch.device("cpu")),
    "a profiler": _in(lambda: torch.autograd.profiler.profile(use_device=None)),
    "inference mode": _in(torch.inference_mode),
    "below autograd": _in(torch._C._AutoDispatchBelowAutograd),
    "forward mode": _dual,
    "torch.jit.trace": _traced,
    "vmap": lambda op: torch.vmap(lambda x: _run(op, x.sum()[None]))(torch.ones(2, 3)),
    "functional gradients": lambda op: torch.func.grad(lambda x: _run(op, x).sum())(torch.ones(3)),
    "make_fx": lambda op: make_fx(lambda x: _run(op, x))(torch.ones(3)),
    "meta": lambda op: _run(op, torch.ones(3, device="meta")),
    "a subclass": lambda op: _run(op, torch.ones(3).as_subclass(_Subclass)),
    "a negation": lambda op: _run(op, torch.ones(3, dtype=torch.complex64).conj().imag),
    "zeros without memory": lambda op: _run(op, torch._efficientzerotensor((3,))),
    "sparse": lambda op: _run(op, torch.ones(3).to_sparse()),
    "an int for a float": lambda op: op(torch.ones(3), None, 2, 1),
    "a tensor for a number": lambda op: op(torch.ones(3), None, torch.tensor(2.0), 1),
    "a name": lambda op: op(torch.ones(3), None, 2.0, power=1),
}


@pytest.mark.parametrize("how", LOOKED_ON.values(), ids=LOOKED_ON)
def test_what_means_more_than_a_kernel_goes_through_the_dispatcher(spied, call, how):
    try:
        how(call)
    except (NotImplementedError, RuntimeError):
        pass  # what torch refuses, it refuses here, too
    assert spied.calls == 1
    _run(call, torch.ones(3))
    assert spied.calls == 1


def test_autocast_and_no_grad_change_nothing_and_take_the_short_way(spied, call):
    x = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert _run(call, x).dtype == torch.float32
    with torch.no_grad():
        assert not _run(call, x).requires_grad
    assert spied.calls == 0


def test_a_compiler_sees_the_op():
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(lambda x: _run(scaled, x) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert OVERLOAD in seen


def test_a_result_changed_in_place_before_its_gradient_is_what_it_is_in_torch():
    def gradient(op):
        x = torch.ones(3, requires_grad=True)
        y = op(x, None, 2.0, 1)
        y.mul_(3)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(gradient(scaled), torch.full((3,), 6.0))
    assert torch.equal(gradient(OVERLOAD), torch.full((3,), 6.0))
    seen = register_op(
        "nearlight_test_direct::seen(Tensor x) -> Tensor",
        lambda x: (2 * x[None]).view(3),
        fake=torch.empty_like,
        cost=lambda *_: Cost(),
        backward=lambda ctx, dy: 2 * dy,
    )
    for op in (seen, torch.ops.nearlight_test_direct.seen.default):
        y = op(torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y.mul_(3)


def test_what_is_saved_goes_through_the_hooks_of_torch_and_checkpoints():
    x, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    packed = []
    with saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):
        y = scaled(x, weight, 2.0, 1)
    right = torch.autograd.grad(y.sum(), (x, weight))
    assert len(packed) == 2
    y = checkpoint(lambda *args: scaled(*args, 2.0, 1), x, weight, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), right))


def test_what_an_op_without_a_formula_gets_for_a_gradient_is_left_to_torch(spied):
    call = direct(spied, _scaled, None, None)
    _run(call, torch.ones(3))
    assert spied.calls == 0
    _run(call, torch.ones(3, requires_grad=True))
    assert spied.calls == 1


@pytest.mark.parametrize("wrong", [1.0, [torch.ones(3)], (torch.ones(3),)])
def test_what_is_no_result_is_reported_by_torch(wrong):
    op = register_op(
        "nearlight_test_direct::wrong(Tensor x) -> Tensor",
        lambda x: wrong,
        fake=torch.empty_like,
        cost=lambda *_: Cost(),
        backward=lambda ctx, dy: dy,
    )
    for needs in (False, True):
        with pytest.raises(RuntimeError, match="Unable to cast"):
            op(torch.ones(3, requires_grad=needs))


def test_several_results_come_as_a_tuple_of_as_many():
    def define(result):
        return register_op(
            "nearlight_test_direct::pair(Tensor x) -> (Tensor, Tensor)",
            lambda x: result(x),
            fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
            cost=lambda *_: Cost(),
            backward=lambda ctx, first, second: first + 2 * second,
        )

    for result in (lambda x: (x + 1, x + 2), lambda x: [x + 1, x + 2]):
        x = torch.ones(3, requires_grad=True)
        first, second = define(result)(x)
        (dx,) = torch.autograd.grad((first + second).sum(), x)
        assert torch.equal(dx, torch.full((3,), 3.0))
    # Torch 2.11 takes three for two, and crashes.
    said = r"returned [13] results; the schema of .*pair says 2"
    for wrong in (lambda x: (x + 1,), lambda x: [x + 1, x + 2, x + 3]):
        for op in (define(wrong), torch.ops.nearlight_test_direct.pair.default):
            with pytest.raises(TypeError, match=said):
                op(torch.ones(3))


def test_an_op_of_other_types_is_called_as_it_is():
    op = register_op(
        "nearlight_test_direct::listed(Tensor[] each) -> Tensor[]",
        lambda each: [x + 1 for x in each],
        fake=lambda each: [torch.empty_like(x) for x in each],
        cost=lambda *_: Cost(),
    )
    assert isinstance(op, torch._ops.OpOverload)
    assert torch.equal(op([torch.ones(2)])[0], torch.full((2,), 2.0))

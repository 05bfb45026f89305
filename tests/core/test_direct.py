"""Past the dispatcher where it makes no difference, and through it where it does."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nearlight.core.cost import Cost
from nearlight.core.register import register_op

CALLS: list[tuple[object, ...]] = []


def _implementation(x, factor, y=None):
    CALLS.append((x, factor, y))
    return x * factor if y is None else x * factor + y


scaled = register_op(
    "direct_tests::scaled(Tensor x, float factor, Tensor? y=None) -> Tensor",
    _implementation,
    fake=lambda x, factor, y=None: torch.empty_like(x),
    cost=lambda args, kwargs, out: Cost(),
    backward=lambda ctx, dout: (dout * ctx.factor, None, None),
    save=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


class Seen(TorchDispatchMode):
    """Writes down the ops that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch):
    """Count calls of the op itself."""
    op = torch.ops.direct_tests.scaled.default
    seen = []
    (cell,) = (c for c in scaled.__closure__ if c.cell_contents is op)

    def spy(*args, **kwargs):
        seen.append(args)
        return op(*args, **kwargs)

    cell.cell_contents = spy
    yield seen
    cell.cell_contents = op


def test_plain_tensors_go_straight_with_the_same_result_and_gradient(dispatched):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    out = scaled(x, 3.0, None)
    assert out.tolist() == [3.0, 6.0]
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert dx.tolist() == [3.0, 3.0]
    with torch.no_grad():
        assert not scaled(x, 3.0, None).requires_grad
    assert scaled(torch.nn.Parameter(x.detach()), 3.0, x.detach()).requires_grad
    assert dispatched == []


OTHERS = {
    "an int for a float": lambda x: scaled(x, 3, None),
    "a default": lambda x: scaled(x, 3.0),
    "a keyword": lambda x: scaled(x, 3.0, y=None),
    "a lazy negative": lambda x: scaled(torch._neg_view(-x), 3.0, None),
    "a subclass": lambda x: scaled(x.as_subclass(type("Sub", (torch.Tensor,), {})), 3.0, None),
    "meta": lambda x: scaled(x.to("meta"), 3.0, None),
    "vmap's level": lambda x: torch.func.jvp(lambda y: y * 2 if scaled(x, 3.0, None) is None
                                             else scaled(x, 3.0, None), (x,), (x,))[0],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_the_dispatcher_can_do_goes_through_it(dispatched, name):
    out = OTHERS[name](torch.tensor([1.0, 2.0]))
    assert dispatched
    if not out.is_meta:
        assert torch.as_tensor(out).tolist() == [3.0, 6.0]


def test_a_mode_sees_the_op():
    with Seen() as seen:
        scaled(torch.ones(2), 3.0, None)
    assert "direct_tests.scaled.default" in seen.names


def test_a_profiler_sees_the_op():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaled(torch.ones(2), 3.0, None)
    assert "direct_tests::scaled" in {event.name for event in profile.events()}


def test_a_trace_holds_the_op():
    traced = torch.jit.trace(lambda x: scaled(x, 3.0, None), torch.ones(2))
    assert "direct_tests::scaled" in str(traced.graph)


def test_a_compiler_sees_the_op():
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda x: scaled(x, 3.0, None), backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "direct_tests.scaled" in graphs[0]


def test_inside_another_op_there_is_no_gradient():
    outer = register_op(
        "direct_tests::outer(Tensor x) -> Tensor",
        lambda x: scaled(x, 3.0, None).clone(),
        fake=torch.empty_like,
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, dout: dout * 30,
        save=lambda ctx, inputs, output: None,
    )
    for call in (outer, torch.ops.direct_tests.outer):
        x = torch.ones(2, requires_grad=True)
        call(x).sum().backward()
        assert x.grad.tolist() == [30.0, 30.0]


def test_an_op_with_lists_is_the_op_itself():
    op = register_op(
        "direct_tests::lists(Tensor[] tensors) -> Tensor",
        lambda tensors: tensors[0] + 1,
        fake=lambda tensors: torch.empty_like(tensors[0]),
        cost=lambda args, kwargs, out: Cost(),
    )
    assert op is torch.ops.direct_tests.lists.default

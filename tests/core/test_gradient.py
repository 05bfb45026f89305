"""The gradient of a torch op: the same as by `torch.library.register_autograd`."""

import pytest
import torch

from nearlight.core.cost import Cost
from nearlight.core.register import register_op


def define(name, schema, implementation, backward, save=None):
    return register_op(
        f"gradient_tests::{name}{schema}",
        implementation,
        fake=lambda *args: torch.empty_like(args[0]),
        cost=lambda args, kwargs, out: Cost(),
        backward=backward,
        save=save,
    )


def scaled(seen):
    def save(ctx, inputs, output):
        seen.append(inputs)
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.factor = inputs[2]

    def backward(ctx, dout):
        x, y = ctx.saved_tensors
        seen.append(ctx.needs_input_grad)
        return dout * y * ctx.factor, dout * x * ctx.factor, None

    return define(
        "scaled",
        "(Tensor x, Tensor y, float factor=2.0) -> Tensor",
        lambda x, y, factor=2.0: x * y * factor,
        backward,
        save,
    )


def test_gradient_sees_defaults_and_needs_as_torch_shows_them():
    seen = []
    scaled(seen)
    x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0])
    out = torch.ops.gradient_tests.scaled(x, y)
    assert out.item() == 30
    for _ in range(2):  # twice: what one pass changes the next must not see
        (dx,) = torch.autograd.grad(out, x, torch.tensor([7.0]), retain_graph=True)
        assert dx.item() == 70
    assert seen[0][2] == 2.0 and isinstance(seen[0], tuple)
    assert seen[1:] == [(True, False)] * 2  # torch drops an argument at its default


def test_without_need_nothing_is_saved():
    seen = []
    op = scaled(seen)
    x = torch.tensor([3.0], requires_grad=True)
    with torch.no_grad():
        assert op(x, x).requires_grad is False
    assert op(torch.ones(1), torch.ones(1), 4.0).item() == 4 and seen == []


def test_a_list_of_tensors_has_gradients_too():
    op = define(
        "total",
        "(Tensor[] tensors) -> Tensor",
        lambda tensors: torch.stack(tensors).sum(0),
        lambda ctx, dout: [dout] * ctx.count,
        lambda ctx, inputs, output: setattr(ctx, "count", len(inputs[0])),
    )
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    op([first, second]).sum().backward()
    assert first.grad.tolist() == second.grad.tolist() == [1.0, 1.0]


def test_keyword_only_arguments_reach_the_implementation():
    op = define(
        "shifted",
        "(Tensor x, *, float by) -> Tensor",
        lambda x, *, by: x + by,
        lambda ctx, dout: dout,
        lambda ctx, inputs, keyword_only_inputs, output: None,
    )
    x = torch.zeros(1, requires_grad=True)
    out = op(x, by=3.0)
    out.backward()
    assert out.item() == 3 and x.grad.item() == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_is_one_node_with_the_same_gradient(backend):
    op = scaled([])
    x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    compiled = torch.compile(lambda x, y: op(x, y), backend=backend, fullgraph=True)
    compiled(x, y).backward()
    assert x.grad.item() == 10 and y.grad.item() == 6


def test_opcheck():
    scaled([])
    op = torch.ops.gradient_tests.scaled.default
    torch.library.opcheck(op, (torch.ones(2, requires_grad=True), torch.ones(2)))

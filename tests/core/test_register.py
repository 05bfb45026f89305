import contextlib

import pytest
import torch
from torch.library import opcheck

from nearlight.core.cost import Cost, formula_for
from nearlight.core.launch import described_launches
from nearlight.core.register import register_op, sparing_others

_triple_bwd = register_op(
    "test_triple_bwd(Tensor dout) -> Tensor",
    lambda dout: 3 * dout,
    fake=torch.empty_like,
    cost=lambda args, kwargs, out: Cost(),
)
_triple = register_op(
    "test_triple(Tensor x) -> Tensor",
    lambda x: 3 * x,
    fake=torch.empty_like,
    cost=lambda args, kwargs, out: Cost(bytes_read=7),
    backward=lambda ctx, dout: _triple_bwd(dout),
)
_fill_ = register_op(
    "test_fill_(Tensor(a!) x) -> ()",
    lambda x: x.fill_(1) and None,
    fake=lambda x: None,
    cost=lambda args, kwargs, out: Cost(),
)


def test_forward_backward_and_cost():
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(_triple(x).sum(), x)
    assert torch.equal(dx, torch.full((3,), 3.0))
    assert formula_for("nearlight::test_triple")((x,), {}, x).bytes_read == 7
    op = torch.ops.nearlight.test_triple.default
    opcheck(op, (x,))
    assert torch.Tag.pt2_compliant_tag in op.tags


def test_a_gradient_of_the_gradient_is_refused_not_lost():
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad((_triple(x) * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="test_triple has no gradient of its gradient; use"):
        dx.sum().backward()


def test_an_op_that_writes_in_place_takes_no_gradient_formula():
    x = torch.zeros(1)
    _fill_(x)
    assert x == 1


def test_annotations_say_the_schema_of_an_op_that_is_named_alone():
    def halves(x: torch.Tensor) -> list[torch.Tensor]:
        return [half.clone() for half in x.chunk(2)]

    op = register_op(
        "nearlight_test_namespace::halves",
        halves,
        fake=lambda x: [torch.empty_like(half) for half in x.chunk(2)],
        cost=lambda args, kwargs, out: Cost(),
        backward=lambda ctx, douts: torch.cat(douts),
    )
    assert str(op._schema).endswith("halves(Tensor x) -> Tensor[]")
    opcheck(op, (torch.randn(4, requires_grad=True),))


def test_an_op_of_another_namespace_that_is_defined_again_replaces_the_former():
    def define(factor):
        name = "nearlight_test_namespace::times"
        backward = register_op(
            f"{name}_bwd(Tensor dout) -> Tensor",
            lambda dout: factor * dout,
            fake=torch.empty_like,
            cost=lambda args, kwargs, out: Cost(),
        )
        return register_op(
            f"{name}(Tensor x) -> Tensor",
            lambda x: factor * x,
            fake=torch.empty_like,
            cost=lambda args, kwargs, out: Cost(bytes_read=factor),
            backward=lambda ctx, dout: backward(dout),
        )

    for factor in (2, 5):
        times = define(factor)
        x = torch.ones(3, requires_grad=True)
        (dx,) = torch.autograd.grad(times(x).sum(), x)
        assert torch.equal(dx, torch.full((3,), float(factor)))
        assert formula_for("nearlight_test_namespace::times")((x,), {}, x).bytes_read == factor
        opcheck(torch.ops.nearlight_test_namespace.times.default, (x,))
        assert torch.equal(torch.ops.nearlight_test_namespace.times(x), factor * x)


def test_an_op_of_the_same_name_in_another_file_is_refused(tmp_path):
    text = (
        "import torch\n"
        "from nearlight.core.cost import Cost\n"
        "from nearlight.core.register import register_op\n"
        "op = register_op('nearlight_test_twice::same(Tensor x) -> Tensor', torch.clone,\n"
        "    fake=torch.empty_like, cost=lambda args, kwargs, out: Cost())\n"
    )
    first, second = (str(tmp_path / name) for name in ("first.py", "second.py"))
    for _ in range(2):
        exec(compile(text, first, "exec"), {})
    with pytest.raises(ValueError, match=rf"same is defined in {first} and again in {second}"):
        exec(compile(text, second, "exec"), {})
    exec(compile(text, first, "exec"), kept := {})
    found = [kept]
    for file in (first, second, second):
        with sparing_others():
            exec(compile(text, file, "exec"), read := {})
        found.append(read)
    assert all(each["op"](torch.ones(2)).tolist() == [1, 1] for each in found)
    names = [each["op"]._schema.name for each in found]
    assert names == ["nearlight_test_twice::same"] + [
        f"nearlight_test_twice_{number}::same" for number in (2, 3, 4)
    ]
    assert all(formula_for(name) for name in names)


def times(factor):
    return register_op(
        "nearlight_test_by_name::times(Tensor x) -> Tensor",
        lambda x: factor * x,
        fake=torch.empty_like,
        cost=lambda args, kwargs, out: Cost(),
    )


def test_a_name_finds_the_op_of_the_file_that_is_read_until_it_is_read():
    ops, one = torch.ops.nearlight_test_by_name, torch.ones(1)
    held = times(2)
    for end in (contextlib.nullcontext(), pytest.raises(KeyError)):
        with end, sparing_others():
            for factor in (3, 5):  # a file may be read twice
                own = times(factor)
                assert ops.times(one) == ops.times.default(one) == own(one) == factor
            assert held(one) == 2
            with sparing_others():
                times(7)
                assert ops.times(one) == 7
            assert ops.times(one) == 5
            if not isinstance(end, contextlib.nullcontext):
                raise KeyError
        assert ops.times(one) == held(one) == 2


def test_on_meta_tensors_the_implementation_runs_where_launches_are_described():
    meta = torch.empty(3, device="meta")
    op = register_op(
        "test_seen_double(Tensor x) -> Tensor",
        lambda x: seen.append("implementation") or torch.empty_like(x),
        fake=lambda x: seen.append("fake") or torch.empty_like(x),
        cost=lambda args, kwargs, out: Cost(),
    )
    seen = []
    op(meta)
    with described_launches(None):
        op(meta)
    assert seen == ["fake", "implementation"]

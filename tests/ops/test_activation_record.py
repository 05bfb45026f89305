import pytest
import torch

from nearlight.core.pointwise import config
from nearlight.ops import OPS
from nearlight.ops._activation_record import (
    builds_of,
    case_of,
    check_approximate,
    check_gate,
    check_x,
    cost_of,
    gated_inputs,
    gelu_reference,
    rows_of,
    saturated,
    unary_inputs,
)
from nearlight.ops._activations import Gated, Unary

CPU = torch.device("cpu")


def generator():
    return torch.Generator().manual_seed(0)


def test_rows_are_of_four_kinds():
    x = rows_of(case_of(8, 400, torch.float32), CPU, generator())
    scale, mean = x.std(dim=1), x.mean(dim=1)
    torch.testing.assert_close(scale[:4], torch.tensor([1.0, 1e-3, 30.0, 0.1]), rtol=0.1, atol=0)
    assert mean[3] == pytest.approx(-20, abs=0.1) and mean[7] == pytest.approx(-20, abs=0.1)


def test_inputs_carry_the_options_and_take_gradients():
    plain = unary_inputs(case_of(2, 3, approximate="tanh"), CPU, generator())
    assert plain["x"].requires_grad and plain["approximate"] == "tanh"
    packed = gated_inputs(case_of(2, 3, up=None), CPU, generator())
    assert packed["gate"].shape == (2, 6) and packed["up"] is None
    gate, up = gated_inputs(case_of(2, 3), CPU, generator()).values()
    assert torch.equal(packed["gate"], torch.cat([gate, up], dim=-1))


def test_cases_are_named_by_what_differs():
    assert case_of(2, 3).name == "2x3"
    assert case_of(2, 3, up=None, approximate="tanh").name == "2x3 packed tanh"
    assert case_of(2, 3, approximate="none").name == "2x3"


def test_saturated_rows_leave_the_inputs_alone():
    inputs = unary_inputs(case_of(3, 4, torch.float32), CPU, generator())
    before = inputs["x"].detach().clone()
    changed = saturated(inputs, "x")["x"]
    assert changed[0].eq(1e4).all() and changed[1].eq(-1e4).all() and changed.requires_grad
    assert torch.equal(changed[2], before[2]) and torch.equal(inputs["x"], before)


def test_refusals():
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"some: x is torch.int32; allowed"):
        check_x("some", x.int())
    with pytest.raises(ValueError, match="some: one packed tensor"):
        check_gate("some", torch.tensor(1.0), None)
    with pytest.raises(ValueError, match="must agree"):
        check_gate("some", x, x.to("meta"))
    with pytest.raises(ValueError, match=r"approximate=None; allowed are 'none' \(by erf\)"):
        check_approximate("some", None)
    check_gate("some", x, x)
    check_gate("some", x, None)
    check_approximate("some", "tanh")


def test_fp64_reference_of_the_tanh_form_does_not_cancel():
    x = torch.tensor([-6.0, -30.0, 0.5, 7.16], dtype=torch.float64, requires_grad=True)
    out = gelu_reference(x, "tanh")
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(
        out, torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-9, atol=1e-14
    )
    assert slope.isfinite().all() and slope[1] == 0
    assert abs(slope[3].item() - 1) < 1e-13


def test_cost_of_a_case_is_that_of_its_torch_ops():
    assert OPS["gelu"]  # registers the formulas
    plain = cost_of(Unary("gelu_tanh", "gelu_tanh", config), case_of(4, 8))
    assert plain["forward"].bytes == 2 * 64 and plain["forward_backward"].bytes == 5 * 64
    gated = cost_of(Gated("geglu", "gelu", config), case_of(4, 8))
    assert gated["forward"].bytes == 3 * 64 and gated["forward_backward"].bytes == 8 * 64


def test_builds_are_those_of_both_directions_and_dtypes():
    builds = builds_of([Gated("geglu", "gelu", config)], "sm_75")
    assert [build.kernel.fn.__name__[-10:] for build in builds] == ["fwd_kernel", "bwd_kernel"] * 3
    assert {build.signature["gate_ptr"] for build in builds} == {"*fp16", "*fp32"}
    assert {build.max_registers for build in builds} == {64}

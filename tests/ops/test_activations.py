"""The activations themselves, value and derivative, against fp64."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from nearlight.core.cost import formula_for
from nearlight.core.pointwise import config
from nearlight.ops._activations import Gated, Unary

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
INF, NAN = float("inf"), float("nan")


def run(name, x, dout=None):
    unary = Unary(name, name, config)
    return unary.forward(x), unary.backward(torch.ones_like(x) if dout is None else dout, x)


def expected(name, x, dout=None):
    x = x.detach().clone().requires_grad_()
    out = PLAIN[name](x)
    return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(x) if dout is None else dout)


# fp16 rounds by 2.4e-4 of what it rounds and by 3e-8 below 6e-5.
@pytest.mark.parametrize(
    "dtype, relative, absolute",
    [
        # In fp64 the truth errs as much: torch's derivative of the tanh form cancels.
        (torch.float64, 1e-14, 1e-14),
        (torch.float32, 1e-6, 3e-7),
        (torch.float16, 6e-4, 4e-8),
        (torch.bfloat16, 4.2e-3, 1e-9),
    ],
)
@pytest.mark.parametrize("name", PLAIN)
def test_every_element_is_right(name, dtype, relative, absolute):
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64).to(dtype)
    truth = expected(name, x.double())
    value, slope = run(name, x)
    torch.testing.assert_close(value.double(), truth[0], rtol=relative, atol=absolute)
    # The derivative crosses 0, where its terms cancel.
    torch.testing.assert_close(slope.double(), truth[1], rtol=relative, atol=max(absolute, 3e-5)
                               if dtype.itemsize == 2 else absolute)  # fmt: skip


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_far_below_zero_nothing_cancels(name):
    # erf(x) + 1 keeps no digit of bf16 below −5: plain PyTorch gives 0 there.
    x = torch.linspace(-9, -5, 33, dtype=torch.float64).bfloat16()
    double = x.double()
    truth = double * torch.special.erfc(-double * 0.5**0.5) / 2
    if name == "gelu_tanh":
        truth = double * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (double + 0.044715 * double**3))
    if name == "silu":
        truth = double * torch.sigmoid(double)
    torch.testing.assert_close(run(name, x)[0].double(), truth, rtol=4.2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_infinities_and_nan_are_those_of_torch(name, dtype):
    x = torch.tensor([INF, -INF, NAN, -1e19, 1e19, 0.0], dtype=dtype)
    value, slope = run(name, x)
    plain_value, plain_slope = expected(name, x)
    if name == "gelu":  # PyTorch's CPU kernel alone answers NaN for inf
        plain_value = x * (0.5 * (1 + torch.erf(x * 0.5**0.5)))
    torch.testing.assert_close(value, plain_value, equal_nan=True, rtol=1e-6, atol=0)
    torch.testing.assert_close(slope[:3], plain_slope[:3], equal_nan=True)
    # Where PyTorch's own derivative is 0 times an overflow, ours is the limit.
    right = [0.0, 2e19 if name == "relu2" else 1.0, 0.0 if name == "relu2" else 0.5]
    torch.testing.assert_close(slope[3:].float(), torch.tensor(right), rtol=4e-3, atol=0)


def test_an_infinite_gradient_stops_at_what_relu_set_to_zero():
    x, dout = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([INF, NAN, 3.0])
    assert run("relu2", x, dout)[1].tolist() == expected("relu2", x, dout)[1].tolist()
    assert run("relu2", x, dout)[1].tolist() == [0.0, 0.0, 12.0]


@pytest.mark.parametrize("name", PLAIN)
def test_a_gate_multiplies_and_both_get_their_gradient(name):
    gate, up, dout = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    value, slope = expected(name, gate)
    gated = Gated(name, name, config)
    torch.testing.assert_close(gated.forward(gate, up), value * up)
    dgate, dup = gated.backward(dout, gate, up)
    torch.testing.assert_close(dgate, dout * up * slope)
    torch.testing.assert_close(dup, dout * value)
    packed = torch.cat([gate, up], dim=-1)
    assert torch.equal(gated.packed_forward(packed), gated.forward(gate, up))
    assert torch.equal(gated.packed_backward(dout, packed), torch.cat([dgate, dup], dim=-1))


def test_cost_counts_each_tensor_once():
    importlib.import_module("nearlight.ops")  # registers them
    x, expanded = torch.empty(6, 4, dtype=torch.bfloat16), torch.empty(4).expand(6, 4)
    forward = formula_for("nearlight::gelu_fwd")((x,), {}, x)
    assert (forward.bytes_read, forward.bytes_written) == (48, 48)
    backward = formula_for("nearlight::gelu_bwd")((expanded, x), {}, x)
    assert (backward.bytes_read, backward.bytes_written) == (16 + 48, 48)
    packed = torch.empty(6, 8, dtype=torch.bfloat16)
    gated = formula_for("nearlight::geglu_tanh_packed_bwd")((x, packed), {}, packed)
    assert (gated.bytes_read, gated.bytes_written) == (3 * 48, 2 * 48)
    assert gated.flops == {"fp32": 19 * 24}

import pytest
import torch
import torch.nn.functional as F

from nearlight.core.builds import check_budget
from nearlight.core.triton import compile_for
from nearlight.ops.dropout import dropout
from nearlight.ops.dropout_add import OP, dropout_add

SEED = torch.tensor([11, -(2**50)])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ours(x, residual, p=0.3, seed=SEED):
    return dropout_add(x, residual, p, seed=seed, backend="triton")


def test_is_dropout_and_a_sum():
    x, residual = random(5, 37), random(5, 37, seed=1)
    branch = dropout(x, 0.3, seed=SEED, backend="triton")
    torch.testing.assert_close(ours(x, residual), residual + branch)
    assert torch.equal(ours(x, torch.zeros(5, 37)), branch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mixed_dtypes(dtype, residual_dtype):
    x = random(6, 33, dtype=dtype).requires_grad_()
    residual = random(6, 33, dtype=residual_dtype, seed=1).requires_grad_()
    out = ours(x, residual)
    assert out.dtype == torch.promote_types(dtype, residual_dtype)
    dout = random(6, 33, seed=2).to(out.dtype)
    dx, dresidual = torch.autograd.grad(out, (x, residual), dout)
    keep = (dropout(torch.ones(6, 33), 0.3, seed=SEED) != 0).double() / 0.7
    wide = residual.double() + x.double() * keep
    tolerance = 2 * torch.finfo(out.dtype).eps if out.dtype != torch.float64 else 1e-12
    torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=4 * tolerance)
    assert dx.dtype == dtype and dresidual.dtype == residual_dtype
    torch.testing.assert_close(dx, (dout.double() * keep).to(dtype))
    assert torch.equal(dresidual, dout.to(residual_dtype))


@pytest.mark.parametrize("which", ["x", "residual", "dout", "all"])
def test_layouts_that_do_not_merge(which):
    flat = {"x": random(2, 3, 4, 5), "residual": random(2, 3, 4, 5, seed=1), "dout": None}
    flat["dout"] = random(2, 3, 4, 5, seed=2)
    laid = {
        name: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        if which in (name, "all")
        else t
        for name, t in flat.items()
    }
    results = []
    for given in (flat, laid):
        x, residual = given["x"].requires_grad_(), given["residual"].requires_grad_()
        out = ours(x, residual)
        results.append((out, *torch.autograd.grad(out, (x, residual), given["dout"])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("frozen", ["x", "residual"])
def test_frozen_input_gets_no_gradient(frozen):
    leaves = {"x": random(3, 5).requires_grad_(), "residual": random(3, 5, seed=1).requires_grad_()}
    both = torch.autograd.grad(ours(**leaves).sum(), tuple(leaves.values()))
    leaves[frozen] = leaves[frozen].detach()
    ours(**leaves).sum().backward()
    for leaf, expected in zip(leaves.values(), both, strict=True):
        assert torch.equal(leaf.grad, expected) if leaf.requires_grad else leaf.grad is None


def test_p_at_its_ends_and_outside_training():
    x, residual = random(3, 5), random(3, 5, seed=1)
    assert torch.equal(ours(x, residual, 0.0), x + residual)
    assert torch.equal(ours(x, residual, 1.0), residual)
    assert torch.equal(dropout_add(x, residual, 0.5, training=False), x + residual)


def test_gradients_of_any_order():
    x, residual = (random(2, 6, seed=i).double().requires_grad_() for i in (0, 1))
    assert torch.autograd.gradcheck(ours, (x, residual), fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, (x, residual), fast_mode=True)


def test_opcheck():
    x, residual = random(3, 4).requires_grad_(), random(4, 3).bfloat16().T.requires_grad_()
    op = torch.ops.nearlight.dropout_add_fwd.default
    torch.library.opcheck(op, (x, residual, SEED, 0.3))
    torch.library.opcheck(op, (residual, x, SEED, 0.3))


def test_empty():
    assert ours(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)


def test_refusals():
    x = random(2, 4)
    with pytest.raises(ValueError, match="residual .* must agree"):
        dropout_add(x, x[:1])
    with pytest.raises(TypeError, match="residual is torch.int64"):
        dropout_add(x, x.long())
    with pytest.raises(ValueError, match="p=2"):
        dropout_add(x, x, 2)


def test_peer_takes_the_inputs_of_the_cases():
    inputs = OP.make_inputs(OP.check_cases[0], torch.device("cpu"), torch.Generator())
    assert OP.peers["torch"]()(**inputs).shape == F.dropout(inputs["x"]).shape


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_machine_code_keeps_its_budget(arch):
    for build in OP.builds(arch):
        assert check_budget(build, compile_for(build, arch)) == []

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from nearlight.core.cost import formula_for
from nearlight.core.hardware import GPUS, find_gpu
from nearlight.core.numerics import judge
from nearlight.core.rows import MAX_BLOCK
from nearlight.ops import OPS, layer_norm
from nearlight.ops.layer_norm import config, reference

OP = OPS["layer_norm"]


def triton(*args, **options):
    return layer_norm(*args, **options, backend="triton")


def run(function, tensors, upstream, dtype=None, **options):
    tensors = [
        t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors
    ]
    y = function(*tensors, **options)
    wanted = [t for t in tensors if t is not None]
    return [y, *torch.autograd.grad(y, wanted, upstream.to(y.dtype))]


def assert_right(x, weight, bias, upstream=None, **options):
    """Hold value and gradients to the tolerance rule."""
    if upstream is None:
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    tensors = x, weight, bias
    ours = run(triton, tensors, upstream, **options)
    plain = run(reference, tensors, upstream, **options)
    truth = run(reference, tensors, upstream, torch.float64, **options)
    for index, (a, p, t) in enumerate(zip(ours, plain, truth, strict=True)):
        assert a.dtype == p.dtype and a.shape == p.shape, index
        judgement = judge(a, p, t)
        assert judgement.passed, f"output or gradient {index}: {judgement.reason}"


@pytest.mark.parametrize(
    "case",
    [*OP.check_cases, *OP.extremes],
    ids=lambda case: case.name + (f"-{case.dtype}" if hasattr(case, "dtype") else ""),
)
def test_values_and_gradients(case):
    is_extreme = hasattr(case, "change")
    shape = case.case if is_extreme else case
    inputs = OP.make_inputs(shape, torch.device("cpu"), torch.Generator().manual_seed(0))
    inputs = case.change(inputs) if is_extreme else inputs
    assert_right(inputs.pop("x"), inputs.pop("weight"), inputs.pop("bias"), **inputs)


@pytest.mark.parametrize(("mean", "std"), [(10.0, 0.01), (30.0, 0.01), (300.0, 0.1)])
@pytest.mark.parametrize("width", [64, 4096, 20_000])
def test_large_mean_keeps_the_variance(mean, std, width):
    # A variance from one pass (E[x²] − mean²) gives NaN here.
    torch.manual_seed(0)
    x = mean + std * torch.randn(2, width)
    truth = F.layer_norm(x.double(), (width,))
    assert float((triton(x) - truth).abs().max()) < 4e-4
    assert_right(x, torch.randn(width), torch.randn(width))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scales(scale):
    assert_right(scale * torch.randn(4, 100), torch.randn(100), torch.randn(100))


def test_default_of_gpt2():
    torch.manual_seed(0)
    module = torch.nn.LayerNorm(768)
    x = torch.randn(2, 6, 768)
    ours = layer_norm(x, module.weight, module.bias, module.eps, backend="triton")
    torch.testing.assert_close(ours, module(x), atol=2e-6, rtol=1e-5)
    assert torch.equal(layer_norm(x, module.weight, module.bias), module(x))


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
)
def test_mixed_dtypes(dtypes):
    x, weight = torch.randn(4, 40).to(dtypes[0]), torch.randn(40).to(dtypes[1])
    assert_right(x, weight, torch.randn(40).to(dtypes[1]))


LAYOUTS = {
    "transposed": lambda: torch.randn(24, 6).t(),
    "swapped": lambda: torch.randn(2, 3, 5, 24).transpose(1, 2),
    "sliced rows": lambda: torch.randn(2, 7, 24)[:, 1:],
    "sliced tail": lambda: torch.randn(2, 7, 24)[:, :-1],
    "sliced columns": lambda: torch.randn(4, 72)[:, 24:48],
    "every second column": lambda: torch.randn(4, 48)[..., ::2],
    "expanded rows": lambda: torch.randn(1, 24).expand(5, 24),
    "odd offset": lambda: torch.randn(4 * 24 + 1)[1:].view(4, 24),
    "one row": lambda: torch.randn(24),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_input_and_upstream(name):
    torch.manual_seed(0)
    x = LAYOUTS[name]()
    parameters = torch.randn(48)[::2], torch.randn(25)[1:]
    assert_right(x, *parameters)
    other = torch.randn(x.shape)
    assert triton(other).is_contiguous()
    assert_right(other, *parameters, upstream=x)


def test_upstream_of_stride_zero():
    x = torch.randn(2, 10, 32).requires_grad_()
    weight, bias = torch.randn(32).requires_grad_(), torch.randn(32).requires_grad_()
    grads = torch.autograd.grad(triton(x, weight, bias).sum(), (x, weight, bias))
    expected = torch.autograd.grad(reference(x, weight, bias).sum(), (x, weight, bias))
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 0, 2520), (0, 8), (4, 0)])
def test_empty(shape):
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    bias = torch.ones(shape[-1], requires_grad=True)
    y = triton(x, weight, bias)
    dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert torch.equal(dbias, torch.zeros_like(bias))


def test_no_input_and_no_upstream_is_written():
    tensors = torch.randn(4, 16, requires_grad=True), torch.randn(16), torch.randn(16)
    upstream = torch.randn(4, 16)
    before = [t.detach().clone() for t in (*tensors, upstream)]
    torch.autograd.grad(triton(*tensors), tensors[0], upstream)
    assert all(torch.equal(b, t) for b, t in zip(before, (*tensors, upstream), strict=True))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_gradients_only_for_what_needs_them(needs):
    torch.manual_seed(0)
    tensors = [
        t.requires_grad_(bool(n))
        for t, n in zip((torch.randn(4, 16), torch.randn(16), torch.randn(16)), needs, strict=True)
    ]
    upstream = torch.randn(4, 16)
    triton(*tensors).backward(upstream)
    wanted = [t for t in tensors if t.requires_grad]
    assert [t.grad is not None for t in tensors] == list(map(bool, needs))
    expected = torch.autograd.grad(reference(*tensors), wanted, upstream)
    for tensor, grad in zip(wanted, expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad, atol=1e-5, rtol=1e-5)


def test_gradients_of_wide_rows_only_for_what_needs_them():
    weight = torch.randn(MAX_BLOCK + 3, requires_grad=True)
    x, upstream = torch.randn(2, MAX_BLOCK + 3), torch.randn(2, MAX_BLOCK + 3)
    (ours,) = torch.autograd.grad(triton(x, weight), weight, upstream)
    (expected,) = torch.autograd.grad(reference(x, weight), weight, upstream)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_second_backward_is_equal_and_double_backward_raises():
    x = torch.randn(3, 8, requires_grad=True)
    loss = triton(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="layer_norm has no gradient of its gradient"):
        second.sum().backward()


def test_gradcheck():
    tensors = [
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 5), 5, 5)
    ]
    assert torch.autograd.gradcheck(triton, tensors)


def test_opcheck():
    x = torch.randn(3, 8, requires_grad=True)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    forward = torch.ops.nearlight.layer_norm_fwd.default
    opcheck(forward, (x, weight, bias, 1e-5, torch.float32))
    _, mean, rstd = (t.detach() for t in forward(x, weight, bias, 1e-5, torch.float32))
    backward = torch.ops.nearlight.layer_norm_bwd.default
    fixed = x.detach(), weight.detach(), bias.detach()
    opcheck(backward, (torch.randn(3, 8), *fixed, mean, rstd, [True, False, True]))


def test_compiles_whole_without_recompiling_per_row_count():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight, bias = torch.randn(16, requires_grad=True), torch.randn(16)
    compiled = torch.compile(lambda x: triton(x, weight, bias) * 2, fullgraph=True, backend=counter)
    for rows in (3, 5, 8, 13):
        x = torch.randn(rows, 16, requires_grad=True)
        y = compiled(x)
        torch.testing.assert_close(y, reference(x, weight, bias) * 2, atol=1e-5, rtol=1e-5)
        y.sum().backward()
        assert x.grad is not None
    assert counter.frame_count <= 2  # the first static, the second for any number of rows


def test_autocast_is_like_plain():
    x = torch.randn(3, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert triton(x).dtype == reference(x).dtype


def test_offsets_past_two_to_the_31():
    # In a process of its own: a 32-bit offset ends it.
    code = """
import torch
from nearlight.ops import layer_norm
x = torch.empty(2**31 + 8, dtype=torch.float16).as_strided((3, 8), (2**30, 1))
x.copy_(torch.arange(24).view(3, 8))
upstream = torch.ones(3, 8, dtype=torch.float16).cumsum(1)
x.requires_grad_()
y = layer_norm(x, backend="triton")
(dx,) = torch.autograd.grad(y, x, upstream)
z = x.detach().clone().requires_grad_()
expected = layer_norm(z, backend="reference")
(dz,) = torch.autograd.grad(expected, z, upstream)
torch.testing.assert_close(y, expected)
torch.testing.assert_close(dx, dz, atol=2e-3, rtol=2e-3)
print("right")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("gpu", [None, *GPUS.values()], ids=lambda gpu: gpu.key if gpu else "cpu")
def test_config_keeps_both_sums_in_registers(gpu):
    for width in (1, 768, MAX_BLOCK // 2, MAX_BLOCK, MAX_BLOCK + 1, 262_144):
        forward = config((5000, width), torch.bfloat16, gpu)
        assert forward.num_programs * forward.block_m >= 5000
        assert (forward.block_n < width) == (width > MAX_BLOCK)
        backward = config((5000, width), torch.bfloat16, gpu, "backward")
        assert (backward.block_n < width) == (width > MAX_BLOCK // 2)
        assert 1 <= backward.num_programs <= 5000
        if gpu:
            threads = 32 * backward.num_warps
            assert 2 * backward.block_m * backward.block_n <= 32 * threads  # fp32 per thread


def test_config_says_what_was_chosen_for_the_h200():
    gpu = find_gpu("h200")
    backward = config((16384, 4096), torch.bfloat16, gpu, "backward")
    assert (backward.block_m, backward.num_programs) == (1, 2 * gpu.num_sms)
    # Fewer rows than SMs: one program per row, none of them idle.
    assert config((7, 4096), torch.bfloat16, gpu, "backward").num_programs == 7


def test_cost_counts_fewest_bytes():
    x = torch.empty(10, 64, dtype=torch.bfloat16)
    weight, bias = (torch.empty(64, dtype=torch.bfloat16) for _ in range(2))
    forward = formula_for("nearlight::layer_norm_fwd")((x, weight, bias), {}, (x,))
    assert (forward.bytes_read, forward.bytes_written) == (1280 + 256, 1280)
    statistics = torch.empty(10), torch.empty(10)
    args = (x, x, weight, bias, *statistics, [True, True, True])
    backward = formula_for("nearlight::layer_norm_bwd")(args, {}, (x, weight, bias))
    assert (backward.bytes_read, backward.bytes_written) == (2560 + 128, 1280 + 256)
    assert backward.num_kernels == 2
    both = OP.cost(dataclasses.replace(OP.cases[0], shape={"rows": 10, "N": 64}))
    assert both["forward_backward"].bytes == forward.bytes + backward.bytes


def test_builds_name_every_argument():
    for build in OP.builds("sm_90"):
        # Triton evaluates the annotations of a kernel: none but its own may stand there.
        assert set(build.kernel.fn.__annotations__.values()) <= {"tl.constexpr"}
        assert set(build.signature) | set(build.constants) == set(build.kernel.arg_names)
        assert not set(build.signature) & set(build.constants)


def test_wrong_arguments_are_refused():
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\).*needs \(8,\)"):
        layer_norm(x, torch.ones(8), torch.ones(7))
    with pytest.raises(TypeError, match=r"x is torch\.int64; allowed are fp16"):
        layer_norm(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"allowed is \(\.\.\., N ≤ 262144\)"):
        layer_norm(torch.tensor(1.0))

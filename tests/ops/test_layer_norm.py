import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from nearlight.core.cost import formula_for
from nearlight.core.hardware import GPUS, find_gpu
from nearlight.core.launch import described_launches
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.triton import compile_for
from nearlight.ops import OPS, layer_norm
from nearlight.ops.layer_norm import config, reference

OP = OPS["layer_norm"]


def triton(*args, **options):
    return layer_norm(*args, **options, backend="triton")


@pytest.mark.parametrize(
    "case",
    [*OP.check_cases, *OP.extremes],
    ids=lambda case: case.name + (f"-{case.dtype}" if hasattr(case, "dtype") else ""),
)
def test_values_and_gradients(assert_right, case):
    is_extreme = hasattr(case, "change")
    shape = case.case if is_extreme else case
    inputs = OP.make_inputs(shape, torch.device("cpu"), torch.Generator().manual_seed(0))
    inputs = case.change(inputs) if is_extreme else inputs
    assert_right(OP, **inputs)


@pytest.mark.parametrize(("mean", "std"), [(10.0, 0.01), (30.0, 0.01), (300.0, 0.1)])
@pytest.mark.parametrize("width", [64, 4096, 20_000])
def test_large_mean_keeps_the_variance(assert_right, mean, std, width):
    # A variance from one pass (E[x²] − mean²) gives NaN here.
    torch.manual_seed(0)
    x = mean + std * torch.randn(2, width)
    assert_right(OP, x, torch.randn(width), torch.randn(width))


def test_default_of_gpt2(assert_right):
    torch.manual_seed(0)
    module = torch.nn.LayerNorm(768)
    x = torch.randn(2, 6, 768)
    assert_right(OP, x, module.weight, module.bias, module.eps)
    assert torch.equal(layer_norm(x, module.weight, module.bias), module(x))


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
)
def test_mixed_dtypes(assert_right, dtypes):
    x, weight = torch.randn(4, 40).to(dtypes[0]), torch.randn(40).to(dtypes[1])
    assert_right(OP, x, weight, torch.randn(40).to(dtypes[1]))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(("dtype", "of_weight"), list(itertools.permutations(FLOATS, 2)))
def test_both_backends_take_every_pair_of_dtypes(dtype, of_weight):
    torch.manual_seed(0)
    values, upstream = [torch.randn(4, 40), torch.randn(40), torch.randn(40)], torch.randn(4, 40)
    results = []
    for backend in ("triton", "reference"):
        dtypes = dtype, of_weight, dtype
        given = [v.to(d).requires_grad_() for v, d in zip(values, dtypes, strict=True)]
        y = layer_norm(*given, backend=backend)
        results.append([y, *torch.autograd.grad(y, given, upstream.to(y.dtype))])
        assert [t.dtype for t in results[-1]] == [dtype, *dtypes]
    limit = 4 * max(torch.finfo(d).eps for d in (dtype, of_weight))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=4 * limit)


@pytest.mark.parametrize("width", [8, 64, 4096, 20_000])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e20), (torch.float32, 1e30), (torch.bfloat16, 1e36), (torch.float64, 1e250)],
)
def test_variance_that_overflows_makes_the_row_0(dtype, scale, width):
    # PyTorch answers NaN or 0, by the width. The row before it must not notice.
    torch.manual_seed(0)
    x = torch.randn(2, width).to(dtype)
    x[1] *= scale
    x.requires_grad_()
    weight, bias = (torch.randn(width).to(dtype).requires_grad_() for _ in range(2))
    upstream = 100 * torch.randn(2, width).to(dtype)
    y = triton(x, weight, bias)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), upstream)
    assert torch.equal(y[1], bias)
    assert (dx[1] == 0).all()
    alone = triton(x[:1], weight, bias)
    expected = torch.autograd.grad(alone, (x, weight), upstream[:1])
    assert torch.equal(y[:1], alone)
    assert torch.equal(dx[0], expected[0][0])
    assert torch.equal(dweight, expected[1])
    torch.testing.assert_close(dbias, upstream.sum(0))


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
def test_layouts_of_input_and_upstream(assert_right, name):
    torch.manual_seed(0)
    x = LAYOUTS[name]()
    parameters = torch.randn(48)[::2], torch.randn(25)[1:]
    assert_right(OP, x, *parameters)
    other = torch.randn(x.shape)
    assert triton(other).is_contiguous()
    assert_right(OP, other, *parameters, upstream=x)


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
    tensors = torch.randn(4, 16), torch.randn(16), torch.randn(16)
    upstream = torch.randn(4, 16)
    leaves = [t.clone().requires_grad_() for t in tensors]
    every = torch.autograd.grad(triton(*leaves), leaves, upstream)
    leaves = [t.clone().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=True)]
    triton(*leaves).backward(upstream)
    for leaf, is_needed, expected in zip(leaves, needs, every, strict=True):
        assert torch.equal(leaf.grad, expected) if is_needed else leaf.grad is None


def test_gradients_of_wide_rows_only_for_what_needs_them(assert_right):
    weight = torch.randn(MAX_BLOCK + 3, requires_grad=True)
    assert_right(OP, torch.randn(2, MAX_BLOCK + 3), weight)


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
    opcheck(backward, (torch.randn(3, 8), *fixed, mean, rstd, True, False, True))


def test_compiles_whole_without_recompiling_per_row_count():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight, bias = torch.randn(16, requires_grad=True), torch.randn(16)
    compiled = torch.compile(lambda x: triton(x, weight, bias) * 2, fullgraph=True, backend=counter)
    for rows in (3, 5, 8, 13):
        x = torch.randn(rows, 16, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        z = x.detach().requires_grad_()
        eager = triton(z, weight, bias) * 2
        assert torch.equal(y, eager)
        assert torch.equal(x.grad, torch.autograd.grad(eager.sum(), z)[0])
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
far = torch.empty(2**31 + 8, dtype=torch.float16).as_strided((3, 8), (2**30, 1))
far.copy_(torch.arange(24).view(3, 8))
upstream = torch.ones(3, 8, dtype=torch.float16).cumsum(1)
results = []
for x in (far, far.clone()):  # the copy's rows lie side by side
    y = layer_norm(x.requires_grad_(), backend="triton")
    results.append((y, *torch.autograd.grad(y, x, upstream)))
assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
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
    args = (x, x, weight, bias, *statistics, True, True, True)
    backward = formula_for("nearlight::layer_norm_bwd")(args, {}, (x, weight, bias))
    assert (backward.bytes_read, backward.bytes_written) == (2560 + 128, 1280 + 256)
    assert backward.num_kernels == 2
    both = OP.cost(dataclasses.replace(OP.cases[0], shape={"rows": 10, "N": 64}))
    assert both["forward_backward"].bytes == forward.bytes + backward.bytes


def test_wrong_arguments_are_refused():
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\).*needs \(8,\)"):
        layer_norm(x, torch.ones(8), torch.ones(7))
    with pytest.raises(TypeError, match=r"x is torch\.int64; allowed are fp16"):
        layer_norm(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"allowed is \(\.\.\., N ≤ 262144\)"):
        layer_norm(torch.tensor(1.0))


def test_the_backward_of_short_rows_rounds_a_product_before_anything_is_taken_off_it():
    """Else a row of one column, whose gradient is exactly zero, keeps the noise of one rounding."""
    fused = {}
    for width in (2, 4096):
        x = torch.empty(64, width, dtype=torch.float32, device="meta")
        weight = torch.empty(width, device="meta")
        norm = sys.modules["nearlight.ops.layer_norm"].norm
        with described_launches(find_gpu("h200")) as builds:
            y, mean, rstd = norm.forward(x, weight, None, 1e-5, x.dtype)
            norm.backward(y, x, weight, None, mean, rstd, True, True, False)
        (build,) = [build for build in builds if "_bwd_kernel" in build.name]
        fused[width] = compile_for(build, "sm_90a").count("FFMA") > 0
    assert fused == {2: False, 4096: True}

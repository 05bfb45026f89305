import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nearlight.core.cost import formula_for
from nearlight.core.hardware import GPUS, find_gpu
from nearlight.core.numerics import judge
from nearlight.core.op import Case
from nearlight.core.row_config import MAX_BLOCK
from nearlight.core.rows import as_rows
from nearlight.ops import OPS, rms_norm
from nearlight.ops.rms_norm import config, reference
from nearlight.workbench.properties import values
from nearlight.workbench.trial import Trial

OP = OPS["rms_norm"]


def triton(*args, **options):
    return rms_norm(*args, **options, backend="triton")


@pytest.mark.parametrize("case", OP.check_cases, ids=lambda case: f"{case.name}-{case.dtype}")
def test_values_and_gradients(assert_right, case):
    inputs = OP.make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert_right(OP, **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(LlamaRMSNorm, {}), (GemmaRMSNorm, {"casting": "gemma", "offset": 1.0})],
)
def test_is_what_transformers_computes(kind, options, dtype):
    torch.manual_seed(0)
    module = kind(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(4, 5, 96, dtype=dtype)
    assert torch.equal(reference(x, module.weight, 1e-5, **options), module(x))
    ours = triton(x, module.weight, 1e-5, **options)
    truth = reference(x.double(), module.weight.double(), 1e-5, **options)
    assert judge(ours, module(x), truth).passed


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_mixed_dtypes(assert_right, casting, dtypes):
    x, weight = torch.randn(4, 40).to(dtypes[0]), torch.randn(40).to(dtypes[1])
    assert_right(OP, x, weight, casting=casting)


@pytest.mark.parametrize("width", [64, 20_000])
def test_mean_square_that_overflows_makes_the_row_0(width):
    # PyTorch's gradient is NaN here: x · dy overflows as well.
    x = torch.full((2, width), 1e37).requires_grad_()
    weight = torch.randn(width, requires_grad=True)
    y = triton(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.full((2, width), 100.0))
    assert all((result == 0).all() for result in (y, dx, dweight))


def test_llama_casting_rounds_before_the_weight():
    # The row normalises to 1 + 2⁻⁹ (rounded: 1) and its like; the weight brings the bits back.
    x = torch.randn(64, 256).bfloat16()
    weight = torch.full((256,), 1.01)
    assert torch.equal(triton(x, weight), reference(x, weight))
    assert not torch.equal(triton(x, weight), triton(x, weight, casting="gemma").float())


LAYOUTS = {
    "transposed": lambda: torch.randn(24, 6).t(),
    "swapped heads": lambda: torch.randn(2, 3, 5, 24).transpose(1, 2),
    "sliced rows": lambda: torch.randn(2, 7, 24)[:, 1:],
    "sliced tail": lambda: torch.randn(2, 7, 24)[:, :-1],
    "sliced columns": lambda: torch.randn(4, 72)[:, 24:48],
    "every second column": lambda: torch.randn(4, 48)[..., ::2],
    "expanded rows": lambda: torch.randn(1, 24).expand(5, 24),
    "expanded columns": lambda: torch.randn(5, 1).expand(5, 24),
    "odd offset": lambda: torch.randn(4 * 24 + 1)[1:].view(4, 24),
    "one row": lambda: torch.randn(24),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_input_and_upstream(assert_right, name):
    torch.manual_seed(0)
    x = LAYOUTS[name]()
    assert_right(OP, x, torch.randn(24))
    other = torch.randn(x.shape)
    assert triton(other, torch.ones(24)).is_contiguous()
    assert_right(OP, other, torch.ones(24), upstream=x)


def test_rows_that_are_views_are_not_copied():
    packed = torch.randn(6, 72)
    assert as_rows(packed[:, 24:48]).data_ptr() == packed[:, 24:48].data_ptr()
    assert as_rows(packed.view(2, 3, 72)).data_ptr() == packed.data_ptr()


@pytest.mark.parametrize("shape", [(3, 0, 2520), (0, 8), (4, 0)])
def test_empty(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(shape[-1], dtype=torch.bfloat16, requires_grad=True)
    y = triton(x, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_no_input_and_no_upstream_is_written(assert_right):
    # z = norm(x) + 2a with x = a: a norm that works in place gives a's gradient twice wrong.
    a, weight, upstream = torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)
    before = a.clone(), weight.clone(), upstream.clone()

    def beside_a_residual(function):
        return lambda x, weight: function(x, weight) + 2 * x

    assert_right(OP, a, weight, upstream=upstream, through=beside_a_residual)
    assert all(torch.equal(b, t) for b, t in zip(before, (a, weight, upstream), strict=True))


def test_gradients_only_for_what_needs_them():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    both = torch.autograd.grad(triton(x, weight).square().sum(), (x, weight))
    for needs in ((True, False), (False, True)):
        leaves = [t.detach().requires_grad_(n) for t, n in zip((x, weight), needs, strict=True)]
        triton(*leaves).square().sum().backward()
        for leaf, is_needed, expected in zip(leaves, needs, both, strict=True):
            assert torch.equal(leaf.grad, expected) if is_needed else leaf.grad is None
    with torch.no_grad():
        assert not triton(x, weight).requires_grad


def test_second_backward_is_equal_and_double_backward_raises():
    x = torch.randn(3, 8, requires_grad=True)
    loss = triton(x, torch.ones(8)).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="rms_norm has no gradient of its gradient"):
        second.sum().backward()


@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_gradcheck(casting):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: triton(x, w, casting=casting), (x, weight))


def test_opcheck():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    forward = torch.ops.nearlight.rms_norm_fwd.default
    opcheck(forward, (x, weight, 1e-6, 0.0, False, torch.float32))
    opcheck(forward, (x.detach().bfloat16().t()[:, :3], None, 1e-6, 0.0, False, torch.float32))
    rstd = forward(x, weight, 1e-6, 0.0, False, torch.float32)[1].detach()
    backward = torch.ops.nearlight.rms_norm_bwd.default
    args = (torch.randn(3, 8), x.detach(), weight.detach(), rstd, 0.0, True, False)
    opcheck(backward, args)


def test_compiles_whole_without_recompiling_per_row_count():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = torch.randn(16, requires_grad=True)
    compiled = torch.compile(lambda x: triton(x, weight) * 2, fullgraph=True, backend=counter)
    for rows in (3, 5, 8, 13):
        x = torch.randn(rows, 16, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        z = x.detach().requires_grad_()
        eager = triton(z, weight) * 2
        assert torch.equal(y, eager)
        assert torch.equal(x.grad, torch.autograd.grad(eager.sum(), z)[0])
    assert counter.frame_count <= 2  # the first static, the second for any number of rows


def test_autocast_is_like_plain():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = triton(x, weight), reference(x, weight)
    assert ours.dtype == plain.dtype == torch.float32


def test_offsets_past_two_to_the_31():
    # In a process of its own: a 32-bit offset ends it.
    code = """
import torch
from nearlight.ops import rms_norm
far = torch.empty(2**31 + 8, dtype=torch.float16).as_strided((3, 8), (2**30, 1))
far.copy_(torch.arange(24).view(3, 8))
upstream = torch.ones(3, 8, dtype=torch.float16).cumsum(1)
results = []
for x in (far, far.clone()):  # the copy's rows lie side by side
    y = rms_norm(x.requires_grad_(), backend="triton")
    results.append((y, *torch.autograd.grad(y, x, upstream)))
assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
print("right")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("rows, width", [(70_000, 4), (1, 8)])
def test_many_rows_and_few_rows(rows, width):
    # One draw in some exceeds the rule by a little; the check draws again, by the same rule.
    case = Case(f"{rows}x{width}", {"rows": rows, "N": width}, torch.float32)
    assert values.examine(OP, Trial(case), "cpu") == ""


@pytest.mark.parametrize("gpu", [None, *GPUS.values()], ids=lambda gpu: gpu.key if gpu else "cpu")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_config_covers_all_rows_within_the_gpu(gpu, direction):
    for rows in (1, 3, 131, 65_536, 1_000_000, 2**31 - 1):
        for width in (1, 100, 128, 4096, 5000, MAX_BLOCK, MAX_BLOCK + 1, 262_144):
            chosen = config((rows, width), torch.float32, gpu, direction)
            assert chosen.block_m & (chosen.block_m - 1) == 0
            assert chosen.block_n & (chosen.block_n - 1) == 0
            assert chosen.block_m * chosen.block_n <= 2**20  # Triton's largest tile
            assert 1 <= chosen.num_programs <= -(-rows // chosen.block_m)
            if direction == "forward":
                assert chosen.num_programs * chosen.block_m >= rows
            blocks = -(-width // chosen.block_n) if direction == "backward" else 1
            if width <= MAX_BLOCK:
                assert blocks == 1 and chosen.block_n >= width
            assert chosen.num_programs * blocks <= 2**31 - 1
            if gpu and direction == "backward":
                stages = chosen.num_stages - 1
                assert chosen.block_m * chosen.block_n * 8 * stages <= gpu.shared_bytes_per_block
                assert 1 <= chosen.num_warps <= 32
                half = config((rows, width), torch.bfloat16, gpu, direction)
                assert half.num_programs * blocks <= 32 * gpu.num_sms


def test_config_says_what_was_chosen_for_the_h200():
    gpu = find_gpu("h200")
    forward = config((16384, 4096), torch.bfloat16, gpu)
    assert (forward.block_m, forward.block_n, forward.num_programs) == (1, 4096, 16384)
    backward = config((16384, 4096), torch.bfloat16, gpu, "backward")
    assert backward.num_programs == 2 * gpu.num_sms
    # Summed one by one, this many fp32 rows would lose digits of the weight gradient.
    assert config((600_000, 4096), torch.float32, gpu, "backward").num_programs == 4381


def test_cost_counts_fewest_bytes():
    x = torch.empty(10, 64, dtype=torch.bfloat16)
    weight = torch.empty(64, dtype=torch.bfloat16)
    forward = formula_for("nearlight::rms_norm_fwd")((x, weight), {}, (x,))
    assert (forward.bytes_read, forward.bytes_written) == (1280 + 128, 1280)
    args = (x, x, weight, torch.empty(10), 0.0, True, True)
    backward = formula_for("nearlight::rms_norm_bwd")(args, {}, (x, weight))
    assert (backward.bytes_read, backward.bytes_written) == (2560 + 128, 1280 + 128)
    assert backward.num_kernels == 2
    both = OP.cost(dataclasses.replace(OP.cases[0], shape={"rows": 10, "N": 64}))
    assert both["forward_backward"].bytes == forward.bytes + backward.bytes


def test_wrong_arguments_are_refused():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\).*needs \(8,\)"):
        rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match="casting='Llama'; allowed are llama, gemma, none"):
        rms_norm(x, weight, casting="Llama")
    with pytest.raises(ValueError, match=r"offset=1\.0 without a weight"):
        rms_norm(x, offset=1.0)
    with pytest.raises(TypeError, match=r"x is torch\.int64; allowed are fp16"):
        rms_norm(torch.ones(2, 8, dtype=torch.int64), weight)
    with pytest.raises(ValueError, match=r"allowed is \(\.\.\., N ≤ 262144\)"):
        rms_norm(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"allowed is \(\.\.\., N ≤ 262144\)"):
        rms_norm(torch.empty(1, 262_145))
    with pytest.raises(ValueError, match="backend='cuda'"):
        rms_norm(x, weight, backend="cuda")


def test_dtensor_is_refused():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(torch.randn(2, 8), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="got a DTensor, allowed are local tensors"):
            rms_norm(x, torch.ones(8))
    finally:
        dist.destroy_process_group()

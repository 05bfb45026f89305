import itertools
import sys

import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.launch import described_launches
from nearlight.ops import OPS
from nearlight.ops._row_norm import case_of

NAMES = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
NORMS = {name: sys.modules[OPS[name].function.__module__].norm for name in NAMES}
names = pytest.mark.parametrize("name", NORMS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(norm, shape=(3, 5), dtype=torch.float32, stream=None):
    """Return what a forward and a backward take but for the gradients that are needed."""
    x = random(*shape, dtype=dtype)
    residual = [random(*shape, dtype=stream or dtype, seed=1)] if norm.has_residual else []
    parameters = [random(shape[-1], dtype=dtype, seed=2) for _ in norm.parameters]
    forward = [x, *residual, *parameters, *norm.options.values(), dtype]
    normed, *statistics = (
        norm.forward(*forward)[1:] if residual else (x, *norm.forward(*forward)[1:])
    )
    passed = [norm.options[option] for option in norm.backward_options]
    end = [dtype] if residual else []
    return forward, [x, *residual, normed, *parameters, *statistics, *passed, *end]


def test_schemas_of_a_plain_norm_and_of_one_with_a_residual():
    ops = torch.ops.nearlight
    assert str(ops.layer_norm_fwd.default._schema) == (
        "nearlight::layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps, "
        "ScalarType dtype) -> (Tensor, Tensor, Tensor)"
    )
    assert str(ops.rms_norm_bwd.default._schema) == (
        "nearlight::rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, "
        "bool needs_dx, bool needs_dweight) -> (Tensor, Tensor)"
    )
    assert str(ops.add_rms_norm_bwd.default._schema) == (
        "nearlight::add_rms_norm_bwd(Tensor dy, Tensor? dtotal, Tensor total, Tensor? weight, "
        "Tensor rstd, float offset, ScalarType dtype, bool needs_dx, bool needs_dresidual, "
        "bool needs_dweight) -> (Tensor, Tensor, Tensor)"
    )


@names
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_a_gradient_not_needed_has_no_elements_and_changes_no_other(name, stream):
    norm = NORMS[name]
    _, given = arguments(norm, dtype=torch.bfloat16, stream=stream)
    every = norm.backward(*given, *[True for _ in norm.inputs])
    is_one = norm.has_residual and stream == torch.bfloat16
    for needs in itertools.product([True, False], repeat=len(norm.inputs)):
        found = norm.backward(*given, *needs)
        fakes = norm._backward_fake(*given, *needs)
        assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in fakes]
        wanted = list(needs)
        if is_one:  # the gradients of x and the residual
            wanted[:2] = needs[0] or needs[1], False
        for gradient, is_wanted, right in zip(found, wanted, every, strict=True):
            assert torch.equal(gradient, right) if is_wanted else gradient.numel() == 0


@names
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_rows_give_zeros(name, shape):
    forward, given = arguments(NORMS[name], shape)
    outputs = NORMS[name].forward(*forward)
    gradients = NORMS[name].backward(*given, *[True for _ in NORMS[name].inputs])
    assert outputs[0].shape == gradients[0].shape == shape
    assert not any(tensor.any() for tensor in (*outputs, *gradients))


@names
def test_costs_of_a_case(name):
    norm, case = NORMS[name], case_of(32, 64)
    rows_bytes, parameter_bytes = 32 * 64 * 2, 64 * 2 * len(norm.parameters)
    costs = norm.cost_of(case)
    passes = 4 if norm.has_residual else 2  # x, y; and what is added, and the sum
    assert costs["forward"].bytes == passes * rows_bytes + parameter_bytes
    back = costs["forward_backward"].bytes - costs["forward"].bytes
    # dy, x, dx; and what else flows into the sum. The weight is read, the bias is not.
    assert back == (3 + norm.has_residual) * rows_bytes + 64 * 2 + parameter_bytes
    assert costs["forward_backward"].num_kernels == 3
    fewer = norm.cost_of(case_of(32, 64, **dict.fromkeys(norm.parameters)))
    assert fewer["forward"].bytes == passes * rows_bytes
    assert fewer["forward_backward"].num_kernels == 2
    wide = norm.cost_of(case_of(32, 100_000))["forward_backward"]
    assert (
        wide.num_kernels == 4 and wide.workspace_bytes > costs["forward_backward"].workspace_bytes
    )


@names
def test_a_wide_stream_costs_its_own_bytes(name):
    norm = NORMS[name]
    if norm.has_residual:
        narrow, wide = (
            norm.cost_of(case_of(32, 64, residual_dtype=dtype))
            for dtype in (torch.bfloat16, torch.float32)
        )
        rows_bytes = 32 * 64 * 2
        assert wide["forward"].bytes - narrow["forward"].bytes == 2 * rows_bytes
        # The sum, what flows into it and a gradient of its own, of twice the bytes.
        both = wide["forward_backward"].bytes - narrow["forward_backward"].bytes
        assert both == (2 + 1 + 1 + 2) * rows_bytes


@names
def test_extra_bytes_are_statistics_and_workspace(name):
    norm, case = NORMS[name], case_of(32, 64)
    workspace = norm.cost_of(case)["forward_backward"].workspace_bytes
    assert norm.extra_bytes_of(case) == 4 * 32 * len(norm.statistics) + workspace


@names
def test_builds_are_of_either_stream_with_registers_by_the_elements_of_a_thread(name):
    norm, builds = NORMS[name], OPS[name].builds("sm_90a")
    streams = {b.signature["x_ptr"] for b in builds if "_bwd_" in b.name}
    assert streams == ({"*bf16", "*fp32"} if norm.has_residual else {"*bf16"})
    for build in builds:
        threads = 32 * build.num_warps
        if "_bwd_" in build.name:
            assert build.max_registers == min(144, 65536 // threads)
        elif "_fwd_" in build.name:
            elements = build.constants.get("BLOCK_M", 1) * build.constants["BLOCK_N"]
            assert build.max_registers == norm.forward_registers * max(1, elements // 32 // threads)


@names
def test_short_rows_of_all_but_the_plain_rms_norm_round_each_product(name):
    norm, fused = NORMS[name], {}
    for width in (16, 17):
        with described_launches(find_gpu("h200")) as builds:
            x = torch.empty(64, width, device="meta")
            norm.run_both(x, x)
        fused[width] = {b.enable_fp_fusion for b in builds if "_bwd_" in b.name}
    assert fused == {16: {norm.fuses_short_rows}, 17: {True}}
    assert norm.fuses_short_rows == (name == "rms_norm")


def test_cases_are_named_by_what_differs():
    assert case_of(2, 3).name == "2x3"
    case = case_of(2, 3, torch.float32, weight=None, residual_dtype=torch.float32)
    assert case.name == "2x3 weight=None residual_dtype=float32"
    assert case.shape == {"rows": 2, "N": 3} and case.dtype == torch.float32

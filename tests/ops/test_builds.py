"""What is compiled for an arch is what is launched."""

import sys

import pytest
import torch

from nearlight.core.hardware import GPUS
from nearlight.core.launch import described_launches
from nearlight.ops import OPS, _softmax
from nearlight.ops._logits import split_add_
from nearlight.ops.adamw import registration as adamw
from nearlight.ops.cross_entropy import launchers as cross_entropy
from nearlight.ops.cross_entropy import record as cross_entropy_record
from nearlight.ops.embedding import kernels as embedding
from nearlight.ops.group_norm import registration as group_norm
from nearlight.ops.linear_cross_entropy import kernels as linear_cross_entropy
from nearlight.ops.linear_log_prob import kernels as linear_log_prob
from nearlight.ops.rope import registration as rope
from nearlight.workbench.launches import launches

ARCHES = sorted({gpu.arch.rstrip("a") for gpu in GPUS.values()})


def launch_row_norm(name):
    norm = sys.modules[f"nearlight.ops.{name}"].norm
    for width, wide in ((96, torch.float32), (20_000, torch.bfloat16)):
        x = torch.ones(5, width, dtype=torch.bfloat16)
        norm.run_both(x, x.to(wide))


def launch_rms_norm():
    launch_row_norm("rms_norm")


def launch_layer_norm():
    launch_row_norm("layer_norm")


def launch_add_rms_norm():
    launch_row_norm("add_rms_norm")


def launch_add_layer_norm():
    launch_row_norm("add_layer_norm")


def launch_adamw():
    p, step = torch.ones(5, 96), torch.ones(())
    states = torch.zeros(5, 96), torch.zeros(5, 96)
    hyper = (1e-3, 0.9, 0.999, 1e-8, 1e-2)
    adamw.step_out_of_place(
        *([tensor] for tensor in (p, p, *states, step)), None, None, None, *hyper, False, None
    )


def launch_gated(kernels):
    x = torch.ones(5, 96)
    kernels.backward(kernels.forward(x, x), x, x)
    kernels.packed_backward(kernels.packed_forward(x), x)


def launch_swiglu():
    launch_gated(sys.modules["nearlight.ops.swiglu"].kernels)


def launch_geglu():
    for kernels in sys.modules["nearlight.ops.geglu"].kernels.values():
        launch_gated(kernels)


def launch_unary(kernels):
    x = torch.ones(5, 96)
    kernels.backward(kernels.forward(x), x)


def launch_silu():
    launch_unary(sys.modules["nearlight.ops.silu"].kernels)


def launch_relu2():
    launch_unary(sys.modules["nearlight.ops.relu2"].kernels)


def launch_gelu():
    for kernels in sys.modules["nearlight.ops.gelu"].kernels.values():
        launch_unary(kernels)


def launch_dropout():
    x, seed = torch.ones(5, 96), torch.ones(2, dtype=torch.int64)
    sys.modules["nearlight.ops.dropout"].kernels.apply(x, seed, 0.1, x.dtype)


def launch_dropout_add():
    x, seed = torch.ones(5, 96), torch.ones(2, dtype=torch.int64)
    sys.modules["nearlight.ops.dropout_add"].kernels.add(x, x, seed, 0.1)


def launch_embedding():
    indices, weight, out = torch.ones(70, dtype=torch.int64), torch.ones(5, 96), torch.ones(70, 96)
    embedding.gather(out, indices, weight, torch.ones((), dtype=torch.int32), 2.0)
    embedding.sum_rows(weight, out, indices, indices, torch.arange(6), 2.0, -1)


def launch_group_norm():
    x, weight = torch.ones(2, 6, 96), torch.ones(6)
    _, mean, rstd = group_norm.forward(x, 3, weight, weight, 1e-5, x.dtype)
    group_norm.backward(x, x, weight, mean, rstd, x.dtype, x.dtype, [True, True, True])


def launch_rope():
    q, table = torch.ones(2, 5, 3, 12), torch.ones(5, 8)
    rope.launch(True, q, q, table, table, None, False, 8, 2)


def launch_linear_cross_entropy():
    logits, row = torch.ones(5, 96, dtype=torch.bfloat16), torch.ones(5)
    labels = torch.ones(5, dtype=torch.int64)
    options = linear_cross_entropy.LossOptions(softcap=30.0)
    linear_cross_entropy.cross_entropy_(logits, labels, row, options)
    split_add_(logits, logits.to(torch.uint8), logits.float(), True)
    linear_cross_entropy.scale_(logits, row[0])


def launch_linear_log_prob():
    logits, labels = torch.ones(5, 96, dtype=torch.bfloat16), torch.ones(5, dtype=torch.int64)
    rows, options = torch.ones(4, 5), linear_log_prob.Options(softcap=30.0, temperature=0.5)
    linear_log_prob.log_prob_of(logits, labels, rows.unbind(), options)
    linear_log_prob.logits_gradient_(logits, labels, rows.unbind(), rows[0], rows[0], options)


def launch_cross_entropy():
    logits, labels = torch.ones(5, 96), torch.ones(5, dtype=torch.int64)
    arguments = cross_entropy_record._arguments(logits, labels, has_gradient=True)
    results = cross_entropy.forward(arguments)
    statistics = torch.ones(2, 5)
    cross_entropy.backward(results.loss, statistics, results.divisor, *arguments)
    cross_entropy.scale(logits, logits, results.loss)


def launch_softmax(name="softmax"):
    config = sys.modules[f"nearlight.ops.{name}"].config
    for width in (96, 20_000):
        x = torch.ones(5, width)
        y = _softmax.forward(config, name == "log_softmax", x, None, 1.0)
        _softmax.backward(config, name == "log_softmax", x, y, None, 1.0)


def launch_log_softmax():
    launch_softmax("log_softmax")


@pytest.mark.parametrize("name", OPS)
def test_described_is_what_is_launched(name):
    launch = globals()[f"launch_{name}"]
    with launches() as launched:
        launch()
    with described_launches(None) as builds, torch.device("meta"):
        launch()
    described = [
        (build.kernel.fn.__name__, constants)
        for build in builds
        if (constants := {k: v for k, v in build.constants.items() if k.isupper()})
    ]
    assert described and len(described) == len(launched)
    for (kernel, constants), (other, sizes) in zip(described, launched, strict=True):
        # Of a launch the sizes are noted.
        assert kernel == other and sizes.items() <= constants.items()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("arch", ARCHES)
def test_builds_take_the_tiles_of_a_gpu_of_the_arch(name, arch):
    if name in ("linear_cross_entropy", "linear_log_prob") and arch == "sm_75":
        with pytest.raises(ValueError, match="sm_80 or later"):
            OPS[name].builds(arch)
        return
    builds = OPS[name].builds(arch)
    assert builds
    for build in builds:
        # Triton evaluates the annotations of a kernel: none but its own may stand there.
        assert set(build.kernel.fn.__annotations__.values()) <= {"tl.constexpr"}
        assert build.signature.keys() | build.constants.keys() == set(build.kernel.arg_names)
        assert build.max_registers < 255


def test_stages_follow_from_the_shared_memory_of_the_arch():
    def stages(arch: str) -> list[int]:
        return [build.constants.get("NUM_STAGES") for build in OPS["rms_norm"].builds(arch)]

    assert stages("sm_90") != stages("sm_120")

"""The committed efficiencies follow from the committed measurements, at today's ceilings."""

import json
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import nn

from nearlight.core import ceilings
from nearlight.core.cost import Cost, formula_for
from nearlight.core.hardware import find_gpu
from nearlight.ops import OPS
from nearlight.profiler import kernel_efficiency
from nearlight.profiler.capture import trace
from nearlight.profiler.kernel_efficiency import FILE, STRIDED, efficiency
from nearlight.profiler.predict import predict_call_s
from nearlight.profiler.target import from_model

DATA = json.loads(FILE.read_text(encoding="utf-8"))
ROWS = {row["op"]: row for row in DATA["rows"]}
H200 = find_gpu("h200")
# The shipped ones, whatever this machine's user has calibrated.
REACHED = ceilings.read(ceilings.package_path("h200"), H200)


def torch_us(name):
    rows = json.loads(FILE.with_name(f"bench-{name}.json").read_text(encoding="utf-8"))["rows"]
    return {
        (row["case"], row["direction"]): row["time_us"]
        for row in rows
        if row["implementation"] == "torch" and "time_us" in row
    }


def reached(num_bytes, time_us, num_kernels):
    ceiling_us = REACHED.time_s(Cost(bytes_read=num_bytes)) * 1e6
    return ceiling_us / (time_us - num_kernels * REACHED.kernel_floor_us)


def norm(name):
    """Return forward's and backward's efficiency: medians over the cases of 16384 rows."""
    times, forward, backward = torch_us(name), [], []
    for case in OPS[name].cases:
        if not case.name.startswith("16384x"):
            continue
        cost = OPS[name].cost(case)
        there, both = (times[case.name, way] for way in ("forward", "forward_backward"))
        bytes_there, bytes_both = cost["forward"].bytes, cost["forward_backward"].bytes
        forward.append(reached(bytes_there, there, 1))
        backward.append(reached(bytes_both - bytes_there, both - there, 2))
    assert len(forward) == 3
    return median(forward), median(backward)


def plain_calls(name, case):
    """Return the calls of an op's plain PyTorch forward on a case of the bench."""

    class Plain(nn.Module):
        def forward(self, **inputs):
            found = OPS[name].reference(**inputs)
            return found[0] if isinstance(found, tuple) else found

    inputs = OPS[name].make_inputs(case, torch.device("meta"), torch.Generator())
    tensors = {k: v.detach() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    return trace(from_model(Plain(), tensors, "prefill")).calls


# Cases of the bench whose plain forward is mostly strided passes: heads transposed and tables
# broadcast; halves of wide rows.
STRIDED_CASES = {"rope": "B4 S8192 H32/8 D128", "swiglu": "16384x14336 packed"}


def strided(name):
    """Return what a case's strided passes reach if its other passes are at the ceiling."""
    (case,) = (case for case in OPS[name].cases if case.name == STRIDED_CASES[name])
    calls = plain_calls(name, case)
    ceiling_us = [REACHED.time_s(replace(call.cost, flops={})) * 1e6 for call in calls]
    slow_us = sum(us for us, call in zip(ceiling_us, calls, strict=True) if call.is_strided)
    floors_us = sum(call.cost.num_kernels for call in calls) * REACHED.kernel_floor_us
    rest_us = sum(ceiling_us) - slow_us + floors_us
    return slow_us / (torch_us(name)[case.name, "forward"] - rest_us)


def adamw():
    lists = [[torch.empty(4096, 4096, device="meta") for _ in range(32)] for _ in range(4)]
    cost = formula_for("aten::_fused_adamw_")((*lists, [], []), {}, None)
    time_us = ROWS["aten::_fused_adamw_"]["time_us"]
    # The source states the rate beside the time: fewest bytes, steps aside.
    assert cost.bytes / time_us / 1e6 == pytest.approx(3.476, abs=1e-3)
    return reached(cost.bytes, time_us, cost.num_kernels)


def test_every_efficiency_follows_from_its_measurement():
    layer_norm, rms_norm, fused = norm("layer_norm"), norm("rms_norm"), adamw()
    derived = {
        "aten::native_layer_norm": layer_norm[0],
        "aten::native_layer_norm_backward": layer_norm[1],
        "aten::_fused_rms_norm": rms_norm[0],
        "aten::_fused_rms_norm_backward": rms_norm[1],
        "aten::_fused_adamw_": fused,
        "aten::_fused_adam_": fused,  # the same kernel
        STRIDED: median(map(strided, STRIDED_CASES)),
    }
    assert {op: row["efficiency"] for op, row in ROWS.items()} == pytest.approx(derived, abs=5e-4)


@pytest.mark.parametrize("name", STRIDED_CASES)
def test_strided_passes_are_predicted_by_it(name):
    (case,) = (case for case in OPS[name].cases if case.name == STRIDED_CASES[name])
    calls = plain_calls(name, case)
    assert ROWS[STRIDED]["efficiency"] in {efficiency(call) for call in calls}
    predicted_us = sum(predict_call_s(call, REACHED, H200) for call in calls) * 1e6
    # One number for both kinds lies between them.
    assert predicted_us == pytest.approx(torch_us(name)[case.name, "forward"], rel=0.25)


def test_a_kernel_without_a_measurement_is_at_the_ceiling(monkeypatch):
    calls = plain_calls("rope", OPS["rope"].cases[0])
    copy = next(call for call in calls if not call.is_strided)
    assert efficiency(copy) == 1.0
    monkeypatch.setattr(kernel_efficiency, "_measured", lambda: {copy.name: 0.5})
    assert efficiency(copy) == 0.5

import pytest

from nearlight.core.hardware import find_gpu
from nearlight.core.report import OpRow, State
from nearlight.profiler.pages import charts


def state(memory, ops=()):
    return State("predicted", 2.0, None, 1.0, sum(memory.values()), 1.0, 0.5, ops, memory)


def test_a_dot_on_the_roof_is_a_call_at_its_limit():
    gpu = find_gpu("h200")
    axes = charts._Axes(charts.INTENSITY, (1.0, 2000.0))
    row = OpRow("aten::mm", "", 1, 1.0, 1.0, 1.0, "compute", 10**13, 10**9)
    dot = charts._dot("before", row, axes, gpu, gpu.peak_tflops("bf16"), 1.0)
    x, y = axes.place(10**4, gpu.peak_tflops("bf16"))
    assert f'cx="{x:.1f}" cy="{y:.1f}"' in dot


def test_memory_bars_are_as_wide_as_their_bytes():
    owners = {"parameters": 2**30, "activations": 3 * 2**30}
    picture = charts.memory(state(owners), None, find_gpu("t4"))
    widths = [float(part.split('"')[0]) for part in picture.split('width="')[1:]]
    assert widths[1] / widths[0] == pytest.approx(3.0, rel=0.01)


def test_the_gpus_size_is_drawn_where_it_is_near():
    gpu = find_gpu("t4")
    full, small = ({"activations": int(f * gpu.memory_bytes)} for f in (1.5, 0.01))
    assert gpu.name in charts.memory(state(full), state(small), gpu)
    assert gpu.name not in charts.memory(state(small), None, gpu)


def test_calls_without_a_share_or_inside_l2_get_no_dot():
    gpu = find_gpu("h200")
    rows = [
        OpRow("aten::mm", "", 1, 1.0, 0.5, 0.5, "compute", 10**12, 10**9),
        OpRow("aten::add", "", 1, 1.0, 0.0, None, "memory", 10, 10**9),
        OpRow("aten::mul", "", 1, 1.0, 0.1, 0.1, "L2", 10, 10**6),
    ]
    picture = charts.roofline(state({"inputs": 1}, rows), None, gpu, "bf16")
    assert picture.count("<circle") == 1

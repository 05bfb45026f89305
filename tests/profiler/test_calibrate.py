"""The pure parts of calibrate: rates and rows. Measuring itself needs a GPU."""

import pytest

from nearlight.core import hardware
from nearlight.core.ceilings import AttentionPoint, Ceilings, Point
from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import find_gpu
from nearlight.core.timing import Timing
from nearlight.profiler import calibrate


def timing(median_us):
    fields = dict.fromkeys(Timing.__dataclass_fields__, 0)
    return Timing(**fields | {"median_us": median_us})


def test_a_rate_is_work_over_time_without_the_floor():
    assert calibrate._rate(8e6, timing(104.0), 4.0) == pytest.approx(8e6 / 100e-6)


def test_at_most_half_of_a_time_is_floor():
    # A call as short as a launch would otherwise have no time at all, or less.
    assert calibrate._rate(1e3, timing(5.0), 4.0) == pytest.approx(1e3 / 2.5e-6)
    assert calibrate._rate(1e3, timing(3.0), 4.0) == pytest.approx(1e3 / 1.5e-6)


def test_copies_are_measured_by_bytes_read_and_written(monkeypatch):
    monkeypatch.setattr(calibrate, "COPY_BYTES", (1 << 20,))
    for name in ("randint", "empty_like"):
        original = getattr(calibrate.torch, name)
        monkeypatch.setattr(
            calibrate.torch, name,
            lambda *a, _original=original, **k: _original(*a, **k | {"device": "cpu"}),
        )  # fmt: skip
    monkeypatch.setattr(calibrate.timing, "time_call", lambda call, **k: timing(14.0))
    told = []
    (point,) = calibrate._copies(4.0, told.append)
    assert point.size == 2 << 20 and told == ["copy of 1 MiB"]
    assert point.rate == pytest.approx((2 << 20) / 10e-6 / 1e9)


def test_every_ceiling_is_a_row_with_its_share_of_the_datasheet():
    gpu = find_gpu("h200")
    peak = gpu.peak_tflops("bf16")
    measured = Ceilings(
        gpu="h200", source="s", versions={}, kernel_floor_us=4.4,
        host_us={"torch_op": 12.2},
        stream=(Point(2 << 30, gpu.memory_gbps / 2),),
        matmul={"bf16": (Point(2 * 4096**3, peak / 4),)},
        attention=(AttentionPoint(64, True, False, 2048, 300.0),
                   AttentionPoint(128, False, True, 8192, 400.0)),
    )  # fmt: skip
    rows = calibrate.rows(measured, gpu)
    assert [row["what"] for row in rows] == [
        "copy of 1024 MiB", "bf16 matmul 4096³", "attention 64 causal fwd, 2048",
        "attention 128 bwd, 8192", "tiny kernel", "host cost of torch_op",
    ]  # fmt: skip
    assert rows[0]["rate"] == gpu.memory_gbps / 2 and rows[0]["of datasheet"] == "50%"
    assert rows[1]["rate"] == peak / 4 and rows[1]["of datasheet"] == "25%"
    assert [row["unit"] for row in rows] == ["GB/s", "TFLOP/s", "TFLOP/s", "TFLOP/s", "us", "us"]
    assert rows[4]["rate"] == 4.4 and rows[5]["rate"] == 12.2


def test_attention_backward_counts_two_and_a_half_forwards(monkeypatch):
    monkeypatch.setattr(calibrate, "HEADS", {64: 32})
    monkeypatch.setattr(calibrate, "SEQ_LENS", (2048,))
    monkeypatch.setattr(calibrate, "_attention_calls", lambda *a: (None, None))
    monkeypatch.setattr(calibrate.timing, "time_call", lambda call, **k: timing(1004.0))
    points = {(p.is_causal, p.is_backward): p.tflops for p in calibrate._attention(4.0, print)}
    # 8 sequences × 32 heads, two products of 2048 × 2048 × 64.
    full = 2 * 2 * 8 * 32 * 2048**2 * 64 / 1000e-6 / 1e12
    assert points == pytest.approx(
        {(False, False): full, (False, True): 2.5 * full,
         (True, False): full / 2, (True, True): 2.5 * full / 2}
    )  # fmt: skip


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "detect_gpu", lambda: None)
    monkeypatch.setattr(calibrate.ceilings, "user_path", lambda key: tmp_path / "never.json")
    with pytest.raises(MissingPart, match=r"^calibrate measures a GPU .*; nearlight predict"):
        calibrate.calibrate()
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_is_written_where_predictions_read_it(monkeypatch, tmp_path):
    gpu = find_gpu("h200")
    shipped = calibrate.ceilings.read(calibrate.ceilings.package_path("h200"), gpu)
    path = tmp_path / "h200" / "calibrate.json"
    monkeypatch.setattr(calibrate, "require_gpu", lambda *_: gpu)
    monkeypatch.setattr(calibrate, "measure", lambda gpu, progress: shipped)
    monkeypatch.setattr(calibrate.ceilings, "user_path", lambda key: path)
    told = []
    report = calibrate.calibrate(progress=told.append)
    assert told == [f"written to {path}"]
    assert calibrate.ceilings.read(path, gpu) == shipped
    copy = shipped.stream[-1].rate
    assert report.answer == (
        f"{gpu.name}: copies {copy / 1e3:.2f} TB/s, {copy / gpu.memory_gbps:.0%} of the datasheet"
    )
    assert report.rows == calibrate.rows(shipped, gpu) and report.gpu == "h200"


def test_what_could_not_be_written_is_not_measured(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibrate, "require_gpu", lambda *_: find_gpu("h200"))
    monkeypatch.setattr(calibrate, "measure", lambda *a: pytest.fail("measured all the same"))
    monkeypatch.setattr(
        calibrate.ceilings, "user_path", lambda key: tmp_path / "file" / "calibrate.json"
    )
    with pytest.raises(BadInput, match="cannot be written"):
        calibrate.calibrate()


def test_fp8_products_need_no_other_dtype_than_the_table_has():
    gpu = find_gpu("h200")
    assert set(calibrate.PIPES) <= set(gpu.peaks_tflops)
    assert "fp8" not in find_gpu("a100-80gb").peaks_tflops, "left out there"

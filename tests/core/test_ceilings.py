import json
import os
from dataclasses import replace

import pytest

from nearlight.core import ceilings as module
from nearlight.core.ceilings import (
    AttentionPoint,
    Ceilings,
    Point,
    carry_over,
    load,
    package_path,
    read,
)
from nearlight.core.cost import Attention, Cost
from nearlight.core.errors import BadInput
from nearlight.core.hardware import GPUS

H200 = GPUS["h200"]
COPY_1GIB = Cost(bytes_read=2**30, bytes_written=2**30)


@pytest.fixture
def made():
    attention = [
        AttentionPoint(dim, causal, backward, seq, (rate + more) / (2 if backward else 1))
        for dim, rate in ((64, 400.0), (128, 600.0))
        for causal in (False, True)
        for backward in (False, True)
        for seq, more in ((1024, 0.0), (4096, 100.0))
    ]
    return Ceilings(
        gpu="h200",
        source="made up",
        versions={},
        kernel_floor_us=4.0,
        host_us={"torch_op": 10.0},
        stream=(Point(1e6, 2400.0), Point(1e8, 4800.0 * 0.9)),
        matmul={"bf16": (Point(1e9, 494.7), Point(1e11, 791.52))},
        attention=tuple(attention),
    )


@pytest.fixture(autouse=True)
def no_user_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "user_path", lambda key: tmp_path / key / "calibrate.json")


def fraction(made, cost):
    """Return how much of a call's limit its predicted time is."""
    return cost.limit_s(GPUS[made.gpu]) / made.time_s(cost)


def test_h200_reproduces_its_own_measurements():
    ceilings = load(H200)
    assert ceilings.kind == "measured" and ceilings.validated
    assert (ceilings.low_factor, ceilings.high_factor) == (0.85, 1.15)
    floor_s = ceilings.kernel_floor_us * 1e-6
    for pipe, points in ceilings.matmul.items():
        for point in points:
            cost = Cost(flops={pipe: int(point.size)}, pattern="matmul")
            expected_s = max(point.size / (point.rate * 1e12), cost.limit_s(H200)) + floor_s
            assert ceilings.predict_s(cost) == pytest.approx(expected_s)
    for point in ceilings.stream:
        cost = Cost(bytes_read=int(point.size))
        expected_s = max(point.size / (point.rate * 1e9), cost.limit_s(H200)) + floor_s
        assert ceilings.predict_s(cost) == pytest.approx(expected_s)
    for point in ceilings.attention:
        of = Attention(point.head_dim, point.seq_len, point.is_causal, point.is_backward)
        cost = Cost({"bf16": 10**12}, pattern="attention", attention=of)
        assert ceilings.time_s(cost) == pytest.approx(1 / point.tflops)


def test_another_h200_was_measured_within_5_percent_of_it():
    ceilings = load(H200)
    assert ceilings.predict_s(COPY_1GIB) * 1e3 == pytest.approx(0.5055, rel=0.05)
    for side, pipe, time_ms in ((4096, "bf16", 0.1776), (8192, "fp8", 0.8372)):
        cost = Cost(flops={pipe: 2 * side**3}, pattern="matmul")
        assert ceilings.predict_s(cost) * 1e3 == pytest.approx(time_ms, rel=0.05)
    # SDPA with cuDNN, batch 2 × 8192, 32 heads of 64, causal: 1.2622 ms, and 4.6724 with backward.
    flops = 4 * 2 * 32 * 8192**2 * 64 // 2
    forward, backward = (
        Cost({"bf16": work}, pattern="attention", attention=Attention(64, 8192, True, is_backward))
        for work, is_backward in ((flops, False), (flops * 5 // 2, True))
    )
    assert ceilings.predict_s(forward) * 1e3 == pytest.approx(1.2622, rel=0.05)
    both_s = ceilings.predict_s(forward) + ceilings.predict_s(backward)
    assert both_s * 1e3 == pytest.approx(4.6724, rel=0.05)


def test_curves_are_linear_in_the_log_of_the_size_and_flat_beyond(made):
    assert made.stream_gbps(1e7) == pytest.approx((2400 + 4320) / 2)
    assert made.stream_gbps(1.0) == 2400
    assert made.stream_gbps(1e12) == pytest.approx(4320)
    assert made.matmul_tflops("bf16", 1e10) == pytest.approx((494.7 + 791.52) / 2)


def test_fraction_of_a_stream_and_of_a_matmul(made):
    assert fraction(made, Cost(bytes_read=10**8)) == pytest.approx(0.9)
    assert fraction(made, Cost({"bf16": 10**11}, pattern="matmul")) == pytest.approx(0.8)
    # A pipe never measured has bf16's share of its own peak.
    assert fraction(made, Cost({"fp8": 10**9}, pattern="matmul")) == pytest.approx(0.5)


def test_the_slower_of_both_ceilings_decides(made):
    # 10⁹ flops take 2.02 µs at half of the peak; 10⁶ bytes 0.42 µs, and 10⁸ bytes 23.1 µs.
    few, many = (Cost({"bf16": 10**9}, bytes_read=n, pattern="matmul") for n in (10**6, 10**8))
    assert made.time_s(few) == pytest.approx(1e9 / 494.7e12)
    assert made.time_s(many) == pytest.approx(1e8 / 4320e9)
    assert made.predict_s(replace(many, num_kernels=3)) == pytest.approx(1e8 / 4320e9 + 12e-6)


def test_attention_takes_the_nearest_head_width_and_its_length(made):
    assert made.attention_tflops(Attention(80, 2048, True, False)) == pytest.approx(450)
    assert made.attention_tflops(Attention(128, 100, False, True)) == pytest.approx(300)
    assert made.attention_tflops(Attention(256, 1 << 20, False, False)) == pytest.approx(700)
    assert made.attention_tflops(None) == pytest.approx(375)
    cost = Cost({"bf16": 10**12}, pattern="attention", attention=Attention(64, 1024, True, False))
    assert made.time_s(cost) == pytest.approx(1e12 / 400e12)


def test_nothing_to_do_costs_nothing(made):
    assert made.time_s(Cost(num_kernels=0)) == 0
    assert made.predict_s(Cost(num_kernels=0)) == 0


@pytest.mark.parametrize("key", GPUS)
def test_no_prediction_beats_the_limit(key):
    gpu = GPUS[key]
    ceilings = load(gpu)
    for pipe in gpu.peaks_tflops:
        for pattern in ("matmul", "attention"):
            for flops in (1, 10**9, 10**12, 10**15):
                for num_bytes in (0, 10**3, 10**11):
                    cost = Cost({pipe: flops}, bytes_read=num_bytes, pattern=pattern)
                    assert 0 < fraction(ceilings, cost) <= 1
                    assert ceilings.predict_s(cost) >= cost.limit_s(gpu)


def test_a_rate_above_the_peak_is_cut_to_the_limit(made):
    cost = Cost(bytes_read=10**9)
    assert replace(made, stream=(Point(1.0, 9999.0),)).time_s(cost) == cost.limit_s(H200)


@pytest.mark.parametrize("key", ["l4", "t4", "b200"])
def test_fractions_are_carried_over_and_said_not_to_be_validated(made, key):
    gpu = GPUS[key]
    other = carry_over(made, gpu)
    half = "fp16" if key == "t4" else "bf16"
    assert other.kind == "predicted" and not other.validated
    assert (other.low_factor, other.high_factor) == (0.6, 1.4)
    assert "not validated" in other.source and "h200" in other.source
    assert fraction(other, Cost({half: 10**11}, pattern="matmul")) == pytest.approx(0.8)
    assert fraction(other, Cost(bytes_read=10**8)) == pytest.approx(0.9)
    attention = Attention(64, 1024, True, False)
    cost = Cost({half: 10**12}, pattern="attention", attention=attention)
    assert fraction(other, cost) == pytest.approx(400 / 989.4)


def test_a_pipe_the_gpu_lacks_is_an_error():
    with pytest.raises(ValueError, match="t4 has no 'bf16' pipe"):
        load(GPUS["t4"]).time_s(Cost({"bf16": 10**9}, pattern="matmul"))


def test_json_there_and_back(made, tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made.to_dict()))
    assert read(path, H200) == made


def test_the_users_file_comes_first(made, tmp_path):
    (tmp_path / "l4").mkdir()
    text = json.dumps(replace(made, gpu="l4", kernel_floor_us=7.0).to_dict())
    (tmp_path / "l4" / "calibrate.json").write_text(text)
    assert load(GPUS["l4"]).kernel_floor_us == 7.0
    assert load(GPUS["l4"]).validated
    # A new calibration counts at once.
    path = tmp_path / "l4" / "calibrate.json"
    path.write_text(text.replace("7.0", "8.0"))
    os.utime(path, ns=(0, 1))
    assert load(GPUS["l4"]).kernel_floor_us == 8.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda v: v.pop("stream"), "'stream' is missing"),
        (lambda v: v.update(schema=9), "schema is 9, known is 1"),
        (lambda v: v.update(gpu="l4"), "holds the ceilings of l4, not of h200"),
        (lambda v: v.update(gpu="x"), "'x' is not in the table"),
        (lambda v: v.update(stream=[]), "every curve needs points"),
        (lambda v: v["stream"][0].update(rate=-1), "positive"),
        (lambda v: v["stream"][0].update(rate=float("nan")), "positive"),
        (lambda v: v["stream"][0].update(rate="fast"), "could not convert"),
        (lambda v: v["attention"][0].update(colour=1), "colour"),
        (lambda v: v["attention"][0].update(seq_len=0), "positive"),
        (lambda v: v.update(host_us=[1]), "has no attribute 'items'"),
        (lambda v: v.update(host_us={"torch_op": -1}), "positive"),
        (lambda v: v.update(attention=v["attention"][:1]), "causal and full"),
        (lambda v: v.update(matmul={}), "neither 'bf16' nor 'fp16'"),
        (lambda v: v.update(host_us={}), "no 'torch_op'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, change, complaint):
    values = json.loads(package_path("h200").read_text())
    change(values)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(BadInput, match=complaint) as caught:
        read(path, H200)
    assert str(path) in str(caught.value)


def test_half_a_file_is_named(tmp_path):
    path = tmp_path / "half.json"
    path.write_text(package_path("h200").read_text()[:300])
    with pytest.raises(ValueError, match="run `nearlight calibrate` again"):
        read(path, H200)

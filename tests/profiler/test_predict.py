from dataclasses import replace

import pytest
import torch
from torch import nn

from nearlight.core.ceilings import CARRIED_ERROR
from nearlight.core.hardware import GPUS, ceilings, find_gpu
from nearlight.profiler.capture import trace
from nearlight.profiler.predict import (
    capacity_bytes,
    predict,
    predict_call_s,
    predict_state,
    predict_target,
    step_limit,
)
from nearlight.profiler.target import load

GIB = 2**30


def off(value, measured):
    return abs(value / measured - 1)


def test_llama_1b_against_its_measurement(llama_1b, h200):
    state = predict_state(llama_1b, h200)
    assert off(state.step_ms, 666.7) < 0.15
    assert off(state.peak_bytes, 107.8 * GIB) < 0.10
    assert off(state.tokens_per_s, 49147) < 0.15
    low, high = state.figures["step_ms"].low, state.figures["step_ms"].high
    assert low <= 666.7 <= high


def test_llama_1b_with_long_sequences_against_its_measurement(h200):
    state = predict_state(trace(load("llama-3.2-1b", batch=2, seq=16384)), h200)
    assert off(state.step_ms, 876.5) < 0.15
    assert off(state.peak_bytes, 107.8 * GIB) < 0.10


def test_decoding_is_bound_by_the_host(h200):
    step = trace(load("llama-3.2-1b", task="decode", batch=1, seq=512))
    state = predict_state(step, h200)
    assert state.ops[0].bound == "idle"
    # 48.4 tokens/s were measured with the eager dynamic cache.
    figure = state.figures["tokens_per_s"]
    assert figure.low <= 48.4 <= figure.high


def test_the_limit_of_a_step_by_hand(h200):
    step = trace(load("llama-3.2-1b", batch=8, seq=4096))
    tokens, hidden, kv, inner, vocab = 32768, 2048, 512, 8192, 128256
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    products = 3 * 2 * tokens * (16 * layer + hidden * vocab)
    attention = 3.5 * 16 * 2 * 8 * 32 * (4096 * 4096 // 2) * 128
    parameters = 1_235_814_400
    moved = 2 * parameters * 4  # bf16: weights, gradients, two moments
    flops_ms = (products + attention) / 989.4e12 * 1e3
    by_hand = flops_ms + moved / 4.8e12 * 1e3
    assert step_limit(step, h200) * 1e3 == pytest.approx(by_hand, rel=1e-4)


def test_predictions_are_never_below_a_limit(make_target, make_llama, llama_1b):
    steps = [llama_1b, trace(make_target()), trace(make_llama()), trace(make_llama(task="prefill"))]
    for gpu in GPUS.values():
        if "bf16" not in gpu.peaks_tflops:
            continue
        reached = ceilings(gpu)
        for step in steps:
            state = predict_state(step, gpu)
            assert state.step_ms >= state.limit_ms and state.share <= 1
            assert state.figures["step_ms"].low >= state.limit_ms
            assert all(row.time_ms >= row.limit_ms for row in state.ops)
            for call in step.calls[:200]:
                assert predict_call_s(call, reached, gpu) > call.cost.limit_s(gpu)


def test_rows_and_idle_time_add_up_to_the_step(make_llama, llama_1b, h200):
    for step in (llama_1b, trace(make_llama())):
        state = predict_state(step, h200)
        assert sum(row.time_ms for row in state.ops) == pytest.approx(state.step_ms)
        assert sum(row.calls for row in state.ops) == len(step.calls)
        assert sum(state.memory.values()) == state.peak_bytes


def test_the_pipe_of_most_flops_and_the_time_without_a_model_are_told(make_target, llama_1b, h200):
    state = predict_state(llama_1b, h200)
    assert state.pipe == "bf16" and state.figures["unmodelled_ms"].value == 0
    assert "single ops err more" in state.figures["step_ms"].source
    step = trace(make_target())
    guessed = tuple(replace(c, is_modelled=c.name != "aten::mm") for c in step.calls)
    state = predict_state(replace(step, calls=guessed), h200)
    products_ms = sum(row.time_ms for row in state.ops if row.name == "aten::mm")
    assert state.pipe == "fp32"
    assert state.figures["unmodelled_ms"].value == pytest.approx(products_ms)


def test_a_given_limit_is_kept(make_target, h200):
    step = trace(make_target())
    state = predict_state(step, h200, limit_s=2.0)
    assert state.limit_ms == 2000.0
    assert state.step_ms == 2000.0  # a prediction never beats the limit


def test_recomputed_products_count_once(make_target, h200):
    step = trace(make_target(nn.Linear(4096, 4096), {"input": torch.zeros(4096, 4096)}))
    again = tuple(replace(c, is_recomputed=True) for c in step.calls if c.phase == "forward")
    assert again
    twice = replace(step, calls=step.calls + again)
    assert step_limit(twice, h200) == step_limit(step, h200)


def test_a_gpu_never_measured_says_so(llama_1b):
    gpu = find_gpu("l40s")
    state = predict_state(llama_1b, gpu)
    figure = state.figures["step_ms"]
    assert "not validated" in figure.source
    assert figure.high == pytest.approx(state.step_ms * (1 + CARRIED_ERROR))


def test_elementwise_calls_take_as_long_as_their_bytes(make_target, h200):
    class Adds(nn.Module):
        def forward(self, x):
            return x + x

    size = 2**28
    step = trace(make_target(Adds(), {"x": torch.empty(size, device="meta")}, "prefill"))
    reached = ceilings(h200)
    expected = 2 * 4 * size / (reached.stream_gbps(2 * 4 * size) * 1e9)
    floor = reached.kernel_floor_us * 1e-6
    # x is named twice and read once.
    assert predict_call_s(step.calls[0], reached, h200) == pytest.approx(expected + floor)


def test_the_report_has_a_row_per_gpu(h200):
    t = load("llama-3.2-1b", batch=8, seq=4096)
    said = []
    report = predict_target(t, [h200, find_gpu("l40s")], said.append)
    assert [row["gpu"] for row in report.rows] == ["h200", "l40s"]
    assert [row["fits"] for row in report.rows] == [True, False]
    assert report.rows[0]["step_ms"] < report.rows[1]["step_ms"]
    assert report.mode == "predicted" and report.findings and said
    assert "llama-3.2-1b on h200" in report.answer
    assert report.rows[1]["peak_bytes"] > capacity_bytes(find_gpu("l40s"))


def test_predicting_a_live_model_leaves_it_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return {"loss": self.linear(x).square().mean()}

    model = Net()
    weight = model.linear.weight
    report = predict(model, {"x": torch.zeros(8, 64)}, gpu=["h100-sxm", "a100-80gb"])
    assert model.linear.weight is weight and weight.grad is None
    assert [row["gpu"] for row in report.rows] == ["h100-sxm", "a100-80gb"]
    assert report.gpu == "h100-sxm" and report.before.step_ms > 0


def test_a_name_with_a_batch_is_refused():
    with pytest.raises(ValueError, match="brings its own batch"):
        predict("gpt2", {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="unknown GPU"):
        predict("gpt2", gpu="h2000")


def test_an_l2_resident_product_is_limited_by_flops_alone(make_target, h200):
    step = trace(make_target())
    products = [c for c in step.calls if c.cost.pattern == "matmul"]
    flops_s = sum(c.cost.flops_s(h200) for c in products)
    moved = step.parameter_bytes + step.gradient_bytes + step.optimizer_bytes + step.input_bytes
    assert step_limit(step, h200) == pytest.approx(flops_s + moved / 4.8e12)

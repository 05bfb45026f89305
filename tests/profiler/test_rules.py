import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlight.core.hardware import ceilings, find_gpu
from nearlight.core.report import OpRow, gib
from nearlight.profiler import rules
from nearlight.profiler.capture import trace
from nearlight.profiler.predict import predict_state
from nearlight.profiler.rules import (
    activation_memory,
    attention_backend,
    does_not_fit,
    dtype_round_trips,
    fp32_matmul,
    host_bound,
    host_syncs,
    materialised_logits,
    optimizer_loop,
    residual_add,
    small_kernels,
    unfused_activation,
    unfused_norm,
    unfused_rope,
)
from nearlight.profiler.rules.evidence import Evidence
from nearlight.profiler.target import load

GIB = 2**30
ROWS, HIDDEN, INNER, VOCAB, LAYERS = 32768, 2048, 8192, 128256, 16


@pytest.fixture(scope="module")
def llama(llama_1b, h200):
    return llama_1b, predict_state(llama_1b, h200), h200


def step_of(target, gpu, optimizer="adamw-fused"):
    step = trace(target, optimizer)
    return step, predict_state(step, gpu), gpu


def test_llama_has_its_findings_largest_gain_first(llama):
    found = rules.find(*llama)
    gains = [finding.gain_ms for finding in found]
    assert gains == sorted(gains, reverse=True)
    fixes = [finding.fix for finding in found if finding.fix]
    assert fixes[0] == "patch:rms_norm"
    assert set(fixes) == {
        "patch:rms_norm",
        "patch:linear_cross_entropy",
        "patch:rope",
        "patch:swiglu",
    }
    assert len(found) >= 5
    for finding in found:
        assert finding.evidence and finding.cause and finding.next_step
        assert finding.gain_bytes >= 0 and not finding.applied


def test_the_gains_of_our_kernels_lead_to_what_liger_was_measured_at(llama):
    """Hugging Face + liger-kernel: 514 ms and 45.4 GiB; its norms and losses move like ours."""
    state = llama[1]
    fixes = [f for f in rules.find(*llama) if f.fix.startswith("patch:")]
    after_ms = state.step_ms - sum(f.gain_ms for f in fixes)
    assert abs(after_ms / 514.0 - 1) < 0.15


@pytest.mark.parametrize("op", ["rms_norm", "linear_cross_entropy", "rope", "swiglu"])
def test_predicted_gains_against_the_patched_program(llama, op):
    from nearlight.nn import patch

    _, before, gpu = llama
    finding = next(f for f in rules.find(*llama) if f.fix == f"patch:{op}")
    target = load("llama-3.2-1b", batch=8, seq=4096)
    after = predict_state(trace(target, prepare=lambda model: patch(model, [op])), gpu)
    assert finding.gain_ms == pytest.approx(before.step_ms - after.step_ms, rel=0.15)
    saved = before.peak_bytes - after.peak_bytes
    assert finding.gain_bytes == pytest.approx(saved, rel=0.05, abs=0.1 * GIB)


def test_norm_gain_by_hand(llama):
    trace, _, gpu = llama
    finding = unfused_norm.find(*llama)
    assert "33 × LlamaRMSNorm" in finding.title
    calls = [c for c in trace.calls if c.place.module_class == "LlamaRMSNorm"]
    assert f"{len(calls)} calls" in finding.evidence
    size = ROWS * HIDDEN * 2
    reached = ceilings(gpu)
    each_s = 5 * size / 3 / (reached.stream_gbps(5 * size / 3) * 1e9)
    fused_ms = 33 * 3 * (each_s * 1e3 + reached.kernel_floor_us / 1e3)
    assert finding.gain_ms == pytest.approx(Evidence(*llama).time_ms(calls) - fused_ms, rel=1e-3)
    # Of each norm, the fp32 input (twice the size) and the normalised bf16 values go; x stays.
    expected = 33 * 2 * size
    assert finding.gain_bytes == pytest.approx(expected, rel=0.05)


def test_logits_gain_by_hand(llama):
    finding = materialised_logits.find(*llama)
    logits = ROWS * VOCAB
    assert f"{ROWS} × {VOCAB}" in finding.title
    # Three arrays of fp32 at the peak; then other tensors make the peak, so less is gained.
    assert f"{gib(3 * 4 * logits)} of the 107.44 GiB" in finding.evidence
    assert 40 * GIB < finding.gain_bytes < 3 * 4 * logits
    # Cast and back, log-softmax, its gradient (three passes) and the gradient of the loss.
    moved = logits * (2 * (2 + 4) + 2 * 4 + 3 * 4 + 4)
    assert finding.gain_ms == pytest.approx((moved - 2 * 2 * logits) / 4.3e12 * 1e3, rel=0.03)


def test_activation_and_rope_gains_by_hand(llama):
    swiglu, rope = unfused_activation.find(*llama), unfused_rope.find(*llama)
    passes, fused = 2 + 3 + 3 + 3 + 3, 3 + 5
    size = LAYERS * ROWS * INNER * 2
    assert swiglu.fix == "patch:swiglu" and "16 × SwiGLU" in swiglu.title
    assert swiglu.gain_ms == pytest.approx((passes - fused) * size / 4.3e12 * 1e3, rel=0.05)
    assert swiglu.gain_bytes == size  # silu(gate) of every layer
    assert rope.fix == "patch:rope" and "16 attentions" in rope.title
    assert rope.gain_ms > 0


def test_a_fused_program_has_none_of_these_findings(make_target, h200):
    class LlamaRMSNorm(nn.Module):
        def forward(self, x):
            return F.relu(x)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = LlamaRMSNorm(), nn.Linear(4096, 4096)

        def forward(self, x):
            return self.linear(self.norm(x))

    step = step_of(make_target(Fused(), {"x": torch.zeros(4096, 4096)}), h200)
    # One kernel that reads and writes once cannot be fused further.
    for rule in (unfused_norm, unfused_activation, unfused_rope, materialised_logits):
        assert rule.find(*step) is None, rule
    for rule in (attention_backend, optimizer_loop, does_not_fit, host_syncs, dtype_round_trips):
        assert rule.find(*step) is None, rule


def test_torchs_layer_norm_gets_its_own_fix(make_target, h200):
    model = nn.Sequential(*(nn.LayerNorm(4096) for _ in range(3)))
    finding = unfused_norm.find(
        *step_of(make_target(model, {"input": torch.zeros(8192, 4096)}), h200)
    )
    assert finding.fix == "patch:layer_norm"
    # One op each way already, so nothing is said of casts and separate kernels.
    assert finding.title == "3 × LayerNorm below the copy ceiling"
    assert finding.evidence.startswith("6 calls")
    assert re.fullmatch(
        r"torch runs one op each way, but its kernels reach \d\d% of a copy's rate", finding.cause
    )
    assert finding.gain_bytes == 0  # it keeps only mean and rstd already


class PlainNorm(nn.Module):
    """An RMSNorm of plain ops, without casts."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class RMSNorm(PlainNorm):
    pass


def test_words_about_norms_are_true_of_them(make_target, h200):
    batch = {"input": torch.zeros(8192, 4096)}
    model = nn.Sequential(nn.Linear(4096, 4096), RMSNorm())
    finding = unfused_norm.find(*step_of(make_target(model, batch), h200))
    assert finding.title == "1 × RMSNorm in separate kernels"
    assert finding.cause == (
        "each square, mean and product reads and writes the whole tensor, and results between "
        "them are kept for the backward pass"
    )
    finding = unfused_norm.find(*step_of(make_target(model, batch, task="prefill"), h200))
    assert finding.cause == "each square, mean and product reads and writes the whole tensor"
    # What torch fuses is not counted among what it does not.
    both = nn.Sequential(nn.Linear(4096, 4096), RMSNorm(), nn.LayerNorm(4096))
    finding = unfused_norm.find(*step_of(make_target(both, batch), h200))
    assert finding.title == "1 × RMSNorm in separate kernels"


def test_gradients_that_meet_at_a_fused_norm_are_not_its_own(h200):
    finding = unfused_norm.find(*step_of(load("gpt2", batch=8, seq=1024), h200))
    assert finding.title == "25 × LayerNorm below the copy ceiling"
    assert finding.evidence.startswith("50 calls")  # 25 each way; 24 sums of gradients beside


def test_an_activation_without_a_gate_is_not_told_of_one(llama, h200):
    finding = unfused_activation.find(*step_of(load("gpt2", batch=8, seq=1024), h200))
    assert finding.title == "12 × activation in separate kernels"
    assert "gate" not in finding.cause and "kernels of their own" in finding.cause
    assert "although gate and up give it back" in unfused_activation.find(*llama).cause


def test_the_loss_casts_only_where_logits_are_no_fp32(llama, h200):
    assert "the loss casts the logits to fp32" in materialised_logits.find(*llama).cause
    wide = step_of(load("gpt2", batch=8, seq=1024, dtype="fp32"), h200)
    assert materialised_logits.find(*wide).cause == (
        "the loss writes log-softmax and two gradients of the same size"
    )


@pytest.mark.parametrize(
    ("preset", "batch", "fixes"),
    [
        ("gpt2", 8, {"patch:layer_norm", "patch:linear_cross_entropy"}),
        (
            "qwen3-0.6b",
            2,
            {"patch:rms_norm", "patch:rope", "patch:swiglu", "patch:linear_cross_entropy"},
        ),
        ("gemma-2-2b", 2, {"patch:rms_norm", "patch:rope", "patch:linear_cross_entropy"}),
        (
            "phi-3-mini",
            2,
            {"patch:rms_norm", "patch:rope", "patch:swiglu", "patch:linear_cross_entropy"},
        ),
    ],
)
def test_the_families(preset, batch, fixes, h200):
    found = rules.find(*step_of(load(preset, batch=batch, seq=1024), h200))
    assert {finding.fix for finding in found if finding.fix} == fixes


def test_eager_attention(make_llama, h200):
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
    eager = step_of(make_llama(8, 2048, attention="eager", **sizes), h200)
    finding = attention_backend.find(*eager)
    assert "2 attentions" in finding.title and "8 × 16 × 2048 × 2048" in finding.evidence
    fused = step_of(make_llama(8, 2048, **sizes), h200)
    assert attention_backend.find(*fused) is None
    realised = eager[1].step_ms - fused[1].step_ms
    assert finding.gain_ms == pytest.approx(realised, rel=0.3)
    assert finding.gain_bytes > 0


def test_what_does_not_fit_comes_first_and_says_what_would(llama_1b):
    gpu = find_gpu("a100-80gb")
    found = rules.find(llama_1b, predict_state(llama_1b, gpu), gpu)
    assert found[0].title.startswith("does not fit: 107.44 GiB")
    assert "activations 69.22 GiB" in found[0].evidence
    # At this peak no gradient exists yet: 2.30 GiB of parameters and twice as much for AdamW.
    assert found[0].cause == (
        "what grows with the batch takes 100.54 GiB at the peak, beside 6.91 GiB of parameters and "
        "optimizer state"
    )
    assert "a batch of about 5 fits" in found[0].next_step


def test_a_model_too_large_for_any_batch(llama_1b, h200):
    predicted = predict_state(llama_1b, h200)
    memory = {"parameters": 40 * GIB, "gradients": 40 * GIB, "optimizer": 80 * GIB}
    # The largest part is activations, but a smaller batch would not help.
    state = replace(predicted, peak_bytes=460 * GIB, memory={**memory, "activations": 300 * GIB})
    finding = does_not_fit.find(llama_1b, state, h200)
    owners = "parameters, gradients and optimizer state"
    assert finding.cause == f"{owners} alone take 160.00 GiB, whatever the batch"
    assert f"shard {owners} over several, or keep the optimizer state" in finding.next_step
    state = replace(predicted, peak_bytes=200 * GIB, memory={"parameters": 200 * GIB})
    finding = does_not_fit.find(llama_1b, state, h200)
    assert finding.cause == "parameters alone take 200.00 GiB, whatever the batch"
    assert finding.next_step == "take a larger GPU, or shard parameters over several"


def test_unfused_optimizers_are_found(make_target, h200):
    model = nn.Linear(4096, 4096, bias=False)
    target = make_target(model, {"input": torch.zeros(16, 4096)})
    for name in ("adamw-foreach", "adamw-loop"):
        finding = optimizer_loop.find(*step_of(target, h200, name))
        assert "fused=True" in finding.next_step and finding.gain_ms > 0
    assert optimizer_loop.find(*step_of(target, h200)) is None


def test_checkpointing_costs_time_and_gives_memory(llama):
    finding = activation_memory.find(*llama)
    assert finding.gain_ms < 0 and 0.3 * llama[1].peak_bytes < finding.gain_bytes
    assert finding.fix == "" and "gradient_checkpointing_enable" in finding.next_step


def test_residual_additions(llama):
    finding = residual_add.find(*llama)
    assert "32 residual additions" in finding.title
    assert "64 calls" in finding.evidence and "32 of them sum gradients" in finding.evidence
    assert finding.fix == "" and "no fix of nearlight takes this" in finding.next_step


def test_casts(llama):
    finding = dtype_round_trips.find(*llama)
    # Each norm casts to fp32 and back, forward and backward; so do the logits and cos and sin.
    assert "136 casts" in finding.title
    assert 20 < finding.gain_ms < 30


def test_fp32_products(make_target, h200):
    model = nn.Linear(4096, 4096)
    step = step_of(make_target(model, {"input": torch.zeros(4096, 4096)}), h200)
    finding = fp32_matmul.find(*step)
    assert finding.fix == "" and "approximate" in finding.next_step
    assert finding.gain_ms > step[1].step_ms / 2
    half = nn.Linear(4096, 4096, dtype=torch.bfloat16)
    batch = {"input": torch.zeros(4096, 4096, dtype=torch.bfloat16)}
    assert fp32_matmul.find(*step_of(make_target(half, batch), h200)) is None


def test_a_small_step_waits_for_the_host(make_llama, h200, llama):
    step = step_of(make_llama(), h200)
    finding = host_bound.find(*step)
    idle = next(row for row in step[1].ops if row.bound == "idle")
    assert finding.gain_ms == pytest.approx(idle.time_ms)
    assert host_bound.find(*llama) is None
    # Fusing there gains host time: the ops that are no longer issued.
    norms = unfused_norm.find(*step)
    calls = [c for c in step[0].calls if c.place.module_class == "LlamaRMSNorm"]
    gone = len(calls) - 5 * 3
    assert norms.gain_ms == pytest.approx(gone * ceilings(h200).host_us_per_op / 1e3)
    assert small_kernels.find(*step) is None


def test_kernels_that_are_mostly_launch(llama, make_target, h200):
    class TinyBesideLarge(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8192, 8192, dtype=torch.bfloat16)

        def forward(self, x, small):
            for _ in range(50):  # hidden from the host behind the product
                small = small + 1
            return self.linear(x).sum() + small.sum()

    batch = {"x": torch.zeros(8192, 8192, dtype=torch.bfloat16), "small": torch.zeros(64)}
    finding = small_kernels.find(*step_of(make_target(TinyBesideLarge(), batch), h200))
    num_kernels = int(finding.title.split()[0])
    assert num_kernels >= 50
    assert finding.evidence.startswith(f"{num_kernels} kernels of ")
    assert finding.gain_ms == pytest.approx(num_kernels * ceilings(h200).kernel_floor_us / 1e3)
    assert "a fix of nearlight stays a kernel of its own" in finding.next_step
    assert small_kernels.find(*llama) is None  # every kernel there is longer than its launch


def test_reading_numbers_in_a_step(make_target, h200):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            y = self.linear(x)
            return y * y.amax().item()

    finding = host_syncs.find(*step_of(make_target(Reads(), {"x": torch.zeros(8, 64)}), h200))
    assert (
        "a number from the GPU, 1 × a step" in finding.title
        and "test_rules.py:" in finding.evidence
    )


def test_measured_times_replace_predicted_ones(llama):
    trace, state, gpu = llama
    rows = [
        OpRow(r.name, r.module, r.calls, 2 * r.time_ms, r.limit_ms, r.share, r.bound, 0, 0)
        for r in state.ops
    ]
    slower = replace(state, mode="measured", step_ms=2 * state.step_ms, ops=rows)
    once, twice = Evidence(trace, state, gpu), Evidence(trace, slower, gpu)
    assert twice.time_ms(trace.calls) == pytest.approx(2 * once.time_ms(trace.calls))
    # Summed in place on a GPU, and one row with the additions of the same module.
    in_place = [replace(r, name="aten::add_") if r.name == "aten::add" else r for r in rows]
    thrice = Evidence(trace, replace(slower, ops=in_place), gpu)
    assert thrice.time_ms(trace.calls) == pytest.approx(2 * once.time_ms(trace.calls))
    without_rows = Evidence(trace, replace(state, ops=()), gpu)
    assert without_rows.time_ms(trace.calls) == pytest.approx(once.time_ms(trace.calls))

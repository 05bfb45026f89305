from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from nearlight.core.numerics import NUM_DRAWS
from nearlight.fixes import proof_by_layer
from nearlight.fixes.fix import Fix, NothingToDo
from nearlight.fixes.kernels import FIXES
from nearlight.fixes.proof_by_layer import longest_stack, prove_by_layer
from nearlight.profiler.target import from_model
from nearlight.profiler.target.language import _decode

FAMILIES = {
    "Llama": ("rms_norm", "rope", "swiglu", "linear_cross_entropy"),
    "Qwen3": ("rms_norm", "rope", "swiglu", "linear_cross_entropy"),
    "Gemma2": ("rms_norm", "rope", "linear_cross_entropy"),
    "GPT2": ("layer_norm", "linear_cross_entropy"),
}


def fixes_of(family):
    return [fix for fix in FIXES if fix.name.removeprefix("patch:") in FAMILIES[family]]


def prove(target, fixes, **options):
    one = {name: value[:1] for name, value in target.make_batch().items()}
    return prove_by_layer(target, target.make_model(), fixes, one, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_kernels_pass_and_every_parameter_is_covered(family, make_target):
    target = make_target(family)
    found = prove(target, fixes_of(family))
    assert found.passed, found.rows[0]
    assert found.method == "one layer at a time, all 2 and the head"
    model = target.make_model()
    name, _ = longest_stack(model)
    parameters = {f"gradient of {key}" for key, _ in model.named_parameters()}
    if family == "Llama":  # its embedding is looked up and not tied
        parameters.remove("gradient of model.embed_tokens.weight")
    if family == "GPT2":
        parameters.remove("gradient of transformer.wpe.weight")
    others = {"loss", "logits", f"input of {name}.0", f"gradient of what {name} gave"}
    layers = {f"{w} of {name}.{i}" for i in (0, 1) for w in ("output", "input gradient")}
    assert {row["name"] for row in found.rows} == parameters | others | layers


def test_inputs_are_those_of_the_running_model(make_target, monkeypatch):
    """A layer alone gives what it gave inside the model; the head makes the model's own loss."""
    target = make_target()
    model, one = target.make_model(), {k: v[:1] for k, v in target.make_batch().items()}
    seen = {}
    model.model.layers[1].register_forward_hook(lambda m, a, out: seen.update(hidden=out))
    loss = target.loss(model, one)
    rows, judged = {}, proof_by_layer.judged

    def keep(ours, plain, truth):
        rows.update(plain)
        return judged(ours, plain, truth)

    monkeypatch.setattr(proof_by_layer, "judged", keep)
    prove_by_layer(target, model, [], one)
    assert torch.allclose(rows["output of model.layers.1"], seen["hidden"], atol=1e-6)
    assert torch.allclose(rows["loss"], loss, atol=1e-6)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_wrong_layer_is_named(layer, make_target):
    target = make_target()
    target.make_model().model.layers[layer].mlp.is_marked = True

    def apply(part):
        found = [module for module in part.modules() if hasattr(module, "is_marked")]
        if not found:
            raise NothingToDo("not this layer")
        handles = [m.register_forward_hook(lambda m, a, out: out * 1.001) for m in found]
        return lambda: [handle.remove() for handle in handles]

    found = prove(target, [Fix("fault", "exact", apply)])
    failed = {row["name"] for row in found.rows if not row["passed"]}
    assert f"output of model.layers.{layer}" in failed
    assert all(f"model.layers.{layer}" in name for name in failed)


def test_a_fault_in_the_head_is_named(make_target, fault):
    found = prove(make_target(), [fault("model.norm", lambda out: out * 1.001)])
    failed = {row["name"] for row in found.rows if not row["passed"]}
    assert "logits" in failed and not any("layers.1 " in name for name in failed)
    assert "output of model.layers.1" not in failed


def test_a_detached_gradient_is_named(make_target, fault):
    found = prove(make_target(), [fault("mlp.up_proj", torch.Tensor.detach)])
    failed = {row["name"]: row["reason"] for row in found.rows if not row["passed"]}
    name = "gradient of model.layers.0.mlp.up_proj.weight"
    assert failed[name] == "not computed by the patched run"
    assert "output of model.layers.0" not in failed


def test_a_fix_without_a_place_is_no_proof(make_target):
    layer_norm = next(fix for fix in FIXES if fix.name == "patch:layer_norm")
    found = prove(make_target(), [layer_norm])
    assert not found.passed and found.rows[0]["name"] == "patch:layer_norm"


def test_a_live_model_in_bf16_keeps_everything(make_model, batch):
    model = make_model(use_cache=True).bfloat16().eval()
    layers = list(model.model.layers)
    modes = [module.training for module in model.modules()]
    found = prove(from_model(model, batch), fixes_of("Llama"))
    assert found.passed, found.rows[0]
    assert list(model.model.layers) == layers
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache is True
    assert not any(m._forward_pre_hooks for m in layers)


def test_a_model_of_the_proofs_own_gives_up_each_layer_once_proved(make_target):
    target = replace(make_target(), is_live=False)
    model = target.make_model()
    gone = []

    def watch(message):
        stack = model.model.layers
        gone.append(sum(isinstance(layer, nn.Identity) for layer in stack))

    one = {name: value[:1] for name, value in target.make_batch().items()}
    found = prove_by_layer(target, model, fixes_of("Llama"), one, progress=watch)
    assert found.passed, found.rows[0]
    assert gone == [0, 0, 1, 2]


def test_decoding_with_a_cache():
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    past = torch.randn(2, 2, 1, 2, 9, 16)
    inputs = {"input_ids": torch.ones(1, 1, dtype=torch.long), "past": past}
    target = replace(from_model(model, inputs, "decode"), loss_fn=_decode)
    fixes = [fix for fix in fixes_of("Llama") if fix.name != "patch:linear_cross_entropy"]
    found = prove(target, fixes)
    assert found.passed, found.rows[0]
    names = {row["name"] for row in found.rows}
    assert {"output", "output of model.layers.0", "output of model.layers.1"} <= names


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "Linear has no list of layers"),
        (nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])), "is not called once each"),
    ],
)
def test_a_model_that_is_no_chain_is_not_run(model, reason):
    if isinstance(model, nn.Sequential):
        model.forward = lambda input: input
    batch = {"input": torch.ones(1, 4)}
    target = from_model(model, batch, loss_fn=lambda m, b: m(b["input"]).sum())
    found = prove_by_layer(target, model, [], batch)
    assert not found.passed and not found.rows
    assert found.method.startswith("not run: ") and reason in found.method


def test_doubtful_rows_are_judged_by_other_inputs_near_the_captured_ones(make_target, monkeypatch):
    judged, outputs = proof_by_layer.judged, []

    def unlucky_at_first(ours, plain, truth):
        found = judged(ours, plain, truth)
        name = "output of model.layers.0"
        outputs.append(plain[name])
        if len(outputs) == 1:
            found[name] = replace(found[name], passed=False)
        return found

    target = make_target()
    model = target.make_model()
    one = {name: value[:1] for name, value in target.make_batch().items()}
    captured = proof_by_layer._capture(target, model, model.model.layers, one, "cpu")
    monkeypatch.setattr(proof_by_layer, "judged", unlucky_at_first)
    setting = proof_by_layer._Setting(target, [], "cpu", proof_by_layer.Counter())
    rows = proof_by_layer._prove_layer(
        setting, "model.layers.0", model.model.layers[0], captured.calls[0]
    )
    assert all(row["passed"] for row in rows) and rows[0]["draws"] == NUM_DRAWS
    assert len(outputs) == 1 + NUM_DRAWS
    distances = [float((out - outputs[0]).norm() / outputs[0].norm()) for out in outputs[1:]]
    assert (
        all(1e-4 < distance < 3e-2 for distance in distances) and len(set(distances)) == NUM_DRAWS
    )


def test_memory_is_asked_for_before_the_work_starts(make_target, monkeypatch):
    monkeypatch.setattr(proof_by_layer, "free_bytes", lambda device: 1000)
    told = []
    found = prove(make_target(), fixes_of("Llama"), progress=told.append)
    assert not found.passed and not found.rows and told == []
    # 2 × 8192 + 64 parameters around the layers, one 8192 of them a lookup without gradient.
    assert found.method.startswith("not run: 0.0 GiB of memory needed")
    assert found.method.endswith("free for what stands around the layers")
    needed = 12 * (2 * 128 * 64 + 64) + 8 * (128 * 64 + 64)
    monkeypatch.setattr(proof_by_layer, "free_bytes", lambda device: needed)
    assert prove(make_target(), fixes_of("Llama")).passed
    monkeypatch.setattr(proof_by_layer, "free_bytes", lambda device: needed - 1)
    assert not prove(make_target(), fixes_of("Llama")).rows

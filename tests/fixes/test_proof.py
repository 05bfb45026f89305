import copy

import pytest
import torch
from torch import nn

from nearlight.fixes import proof
from nearlight.fixes.fix import Fix
from nearlight.fixes.kernels import FIXES
from nearlight.profiler.target import from_model, load

FAMILIES = {
    "Llama": ("rms_norm", "rope", "swiglu", "linear_cross_entropy"),
    "Qwen3": ("rms_norm", "rope", "swiglu", "linear_cross_entropy"),
    "Gemma2": ("rms_norm", "rope", "linear_cross_entropy"),
    "GPT2": ("layer_norm", "linear_cross_entropy"),
}


def fixes_of(family):
    return [fix for fix in FIXES if fix.name.removeprefix("patch:") in FAMILIES[family]]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_kernels_pass(family, make_target):
    target = make_target(family)
    found = proof.prove(target, fixes_of(family))
    assert found.passed, found.rows[0]
    assert "interpreted on the CPU in fp32, 24 tokens" in found.method
    assert "whole model, all 2 layers" in found.method
    names = {row["name"] for row in found.rows}
    parameters = {f"gradient of {name}" for name, _ in target.make_model().named_parameters()}
    assert names == {"loss", "logits"} | parameters
    of_allowed = [row["of_allowed"] for row in found.rows]
    assert of_allowed == sorted(of_allowed, reverse=True) and 0 < of_allowed[0] <= 1


def test_a_layer_whose_output_is_scaled_by_a_thousandth_fails(make_target, fault):
    found = proof.prove(make_target(), [fault("layers.1.mlp", lambda out: out * 1.001)])
    assert not found.passed
    failed = {row["name"] for row in found.rows if not row["passed"]}
    assert {"logits", "gradient of model.layers.1.mlp.down_proj.weight"} <= failed
    assert "whole" in found.rows[0]["reason"] and not found.rows[0]["passed"]


def test_a_detached_gradient_fails_by_name(make_target, fault):
    found = proof.prove(make_target(), [fault("layers.0.mlp", torch.Tensor.detach)])
    rows = {row["name"]: row for row in found.rows}
    assert rows["loss"]["passed"] and rows["logits"]["passed"], "values are those of plain PyTorch"
    assert not found.passed
    lost = rows["gradient of model.layers.0.mlp.up_proj.weight"]
    assert not lost["passed"] and lost["reason"] == "not computed by the patched run"
    assert not found.rows[0]["passed"]


def test_a_fix_that_changes_the_loss_only_fails(make_target):
    def apply(model):
        loss_function = model.loss_function
        model.loss_function = lambda *args, **kwargs: loss_function(*args, **kwargs) + 0.01
        return lambda: vars(model).pop("_loss_function")

    found = proof.prove(make_target(), [Fix("fault:loss", "exact", apply)])
    assert [row["name"] for row in found.rows if not row["passed"]] == ["loss"]
    assert found.rows[0]["name"] == "loss"


def test_a_fault_in_the_wiring_cannot_hide_in_the_truth(make_target):
    """A wrong eps is wrong in every backend, the reference included."""

    def apply(model):
        model.model.norm.variance_epsilon *= 100
        return lambda: None

    assert not proof.prove(make_target(), [Fix("fault:eps", "exact", apply)]).passed


def test_nan_is_a_row_without_numbers(make_target, fault):
    found = proof.prove(make_target(), [fault("layers.1", lambda out: out * float("nan"))])
    assert not found.passed
    assert "error" not in found.rows[0] and "nan" in found.rows[0]["reason"]


def test_a_live_model_is_not_touched(make_model, batch):
    model = make_model("Llama", use_cache=True).bfloat16().eval()
    model.train()(**batch).loss.backward()
    model.eval()
    model.model.layers[0].train()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    grads = {name: id(parameter.grad) for name, parameter in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    found = proof.prove(from_model(model, batch), fixes_of("Llama"))
    assert found.passed, found.rows[0]
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert {name: id(p.grad) for name, p in model.named_parameters()} == grads
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.config.use_cache is True


def test_random_state_is_left_alone(make_target):
    target = make_target("GPT2")
    before = torch.get_rng_state()
    proof.prove(target, fixes_of("GPT2"))
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_is_proved_by_its_output(make_target, fault):
    target = make_target(task="prefill")
    fixes = [fix for fix in fixes_of("Llama") if fix.name != "patch:linear_cross_entropy"]
    found = proof.prove(target, fixes)
    assert found.passed and [row["name"] for row in found.rows] == ["output"]
    assert not proof.prove(target, [fault("layers.1.mlp", lambda out: out * 1.001)]).passed


def test_a_model_of_ones_own_with_its_own_loss():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 5), nn.Dropout(0.5))
    target = from_model(
        model, {"x": torch.randn(3, 7, 32)}, loss_fn=lambda m, b: m(b["x"]).logsumexp(-1).mean()
    )
    found = proof.prove(target, [fix for fix in FIXES if fix.name == "patch:layer_norm"])
    assert found.passed, found.rows[0]
    assert {"loss", "logits", "gradient of 0.bias"} <= {row["name"] for row in found.rows}


def test_too_large_goes_by_layer_and_says_why(make_target, monkeypatch):
    monkeypatch.setattr(proof, "LARGEST_WHOLE", 1000)
    found = proof.prove(make_target(), fixes_of("Llama"))
    assert found.passed, found.rows[0]
    assert "one layer at a time" in found.method and "whole up to" in found.method


def test_short_memory_goes_by_layer_and_says_why(make_target, monkeypatch):
    monkeypatch.setattr(proof, "free_bytes", lambda device: 2**20)
    found = proof.prove(make_target(), fixes_of("Llama"))
    assert found.passed, found.rows[0]
    assert "one layer at a time" in found.method and "GiB free for the whole model" in found.method


def test_a_preset_that_cannot_even_be_loaded_is_refused_before_it_is(monkeypatch):
    target = load("llama-3.1-8b", batch=1, seq=32)
    monkeypatch.setattr(proof, "free_bytes", lambda device: 8 * 2**30)
    found = proof.prove(target, FIXES)
    assert not found.passed and not found.rows
    assert found.method == (
        "not run: 15.0 GiB of memory needed and 8.0 GiB free for the model alone"
    )

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nearlight import ops
from nearlight.core import backend
from nearlight.core.numerics import judge
from nearlight.nn import Patched, compare_models, is_patched, patch, unpatch

Batch = dict[str, torch.Tensor]
Make = Callable[..., Any]

DECODER = {"linear_cross_entropy": 1, "rope": 2, "swiglu": 2, "rms_norm": 5}
EXPECTED = {
    "Llama": DECODER,
    "Mistral": DECODER,
    "Qwen2": DECODER,
    "Qwen3": DECODER | {"rms_norm": 9},
    "SmolLM3": DECODER | {"rope": 1},
    "Phi3": DECODER,
    "Granite": DECODER,
    "Gemma2": {"linear_cross_entropy": 1, "rope": 2, "rms_norm": 9},
    "Gemma3": {"linear_cross_entropy": 1, "rope": 2, "rms_norm": 13},
    "Mixtral": {"linear_cross_entropy": 1, "rope": 2, "rms_norm": 5},
    "Qwen3Moe": {"linear_cross_entropy": 1, "rope": 2, "rms_norm": 9},
    "GPT2": {"linear_cross_entropy": 1, "layer_norm": 5},
}
SKIPPED = {
    "SmolLM3": ("SmolLM3Attention", "no rotary embedding"),
    "Gemma2": ("Gemma2MLP", "GELU"),
    "Gemma3": ("Gemma3MLP", "GELU"),
    "Mixtral": ("MixtralExperts", "experts"),
    "Qwen3Moe": ("Qwen3MoeExperts", "experts"),
    "GPT2": ("GPT2MLP", "GELU"),
}


def ops_of(patched: Patched) -> dict[str, int]:
    return {row.op: row.count for row in patched.rows}


def snapshot(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Everything that patching could leave behind, by identity."""
    return {
        name: (
            type(module),
            module.forward.__func__,
            {key: id(value) for key, value in vars(module).items()},
            [id(p) for p in module.parameters(recurse=False)],
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    }


def test_every_family_gets_the_ops_that_exist(family: str, make_model: Make) -> None:
    patched = patch(make_model(family))
    assert ops_of(patched) == EXPECTED[family]
    assert patched.reason == ""
    if family in SKIPPED:
        (row,) = patched.skipped
        name, why = SKIPPED[family]
        assert row.module == name and why in row.reason and f"{name}: left alone" in str(patched)
    else:
        assert patched.skipped == ()


def test_outputs_loss_and_every_gradient_stay(family: str, make_model: Make, batch: Batch) -> None:
    plain, model = make_model(family), make_model(family)
    patch(model)
    comparison = compare_models(plain, model, batch)
    assert comparison.passed, comparison
    compared = {row.module for row in comparison.rows if row.quantity == "gradient"}
    assert compared == {name for name, p in plain.named_parameters() if p.requires_grad}
    assert any(row.module == "[0]" or row.module == "" for row in comparison.rows)
    fused = [text for text in comparison.not_compared if "fused away" in text]
    assert len(fused) == 2, comparison.not_compared  # the head's output and the model's logits


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms_round_where_the_familys_norm_rounds(
    weight_dtype: torch.dtype, family: str, make_model: Make
) -> None:
    model = make_model(family).to(weight_dtype)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    generator = torch.Generator().manual_seed(2)
    x = [torch.randn(5, m.weight.shape[0], generator=generator).bfloat16() * 3 for m in norms]
    if family == "GPT2":  # torch's layer_norm takes weights of the input's dtype only
        x = [each.to(weight_dtype) for each in x]
    expected = [m(each) for m, each in zip(norms, x, strict=True)]
    patch(model)
    for m, each, value in zip(norms, x, expected, strict=True):
        assert is_patched(m) and m(each).dtype == value.dtype and torch.equal(m(each), value)


def test_unpatch_undoes_exactly(family: str, make_model: Make, batch: Batch) -> None:
    model = make_model(family).eval()
    expected = model(**batch)  # before the snapshot: transformers installs hooks of its own
    before, storages = snapshot(model), {k: v.data_ptr() for k, v in model.state_dict().items()}
    patch(model)
    assert any(is_patched(module) for module in model.modules())
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == storages
    model.train()(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()
    unpatch(model)
    assert snapshot(model) == before
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == storages
    after = model(**batch)
    assert torch.equal(after.loss, expected.loss) and torch.equal(after.logits, expected.logits)


def test_generates_the_same_tokens(family: str, make_model: Make, batch: Batch) -> None:
    plain, model = make_model(family).eval(), make_model(family).eval()
    for each in (plain, model):
        if hasattr(each.config, "output_router_logits"):
            each.config.output_router_logits = False  # transformers 5.17 cannot while generating
    patch(model)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(2, 12).long()}
    assert torch.equal(model.generate(**ids, **options), plain.generate(**ids, **options))


def test_other_models_of_the_class_are_untouched(make_model: Make, batch: Batch) -> None:
    model, other = make_model("Llama"), make_model("Llama")
    classes = {type(module): dict(vars(type(module))) for module in other.modules()}
    before, expected = snapshot(other), other(**batch)
    patch(model)
    assert snapshot(other) == before
    assert all(dict(vars(cls)) == members for cls, members in classes.items())
    assert torch.equal(other(**batch).logits, expected.logits)


def test_patching_twice_is_patching_once(make_model: Make, batch: Batch) -> None:
    model = make_model("Qwen3")
    first = patch(model)
    classes = [type(module) for module in model.modules()]
    assert patch(model) == first
    assert [type(module) for module in model.modules()] == classes


def test_a_head_that_two_models_share_belongs_to_the_first(make_model: Make, batch: Batch) -> None:
    model, other = make_model("Llama"), make_model("Llama")
    other.lm_head = model.lm_head
    assert ops_of(patch(model)) == DECODER
    only_other = patch(other)
    assert "linear_cross_entropy" not in ops_of(only_other)
    assert "lm_head is shared with another model" in only_other.skipped[0].reason
    assert other(**batch).logits.shape[-1] == 97
    unpatch(other)  # which does not own the head
    assert model(**batch).logits.shape[-1] == 0
    unpatch(model)
    assert type(model.lm_head) is nn.Linear
    both = nn.ModuleList([other, model])
    assert ops_of(patch(both))["linear_cross_entropy"] == 1 and patch(both) == patch(both)
    assert [m(**batch).logits.shape[-1] for m in both] == [0, 97]
    unpatch(both)
    assert not any(is_patched(module) for module in both.modules())


def test_only_the_ops_asked_for(make_model: Make) -> None:
    model = make_model("Gemma2")
    assert ops_of(patch(model, only=["rms_norm"])) == {"rms_norm": 9}
    assert not is_patched(model)
    assert ops_of(patch(model, only=["rope"])) == {"rope": 2}
    with pytest.raises(ValueError, match=r"'geglu'.*allowed are layer_norm.*rope"):
        patch(model, only=["rms_norm", "geglu"])


def test_off_changes_nothing_and_says_so(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARLIGHT", "off")
    model = make_model("Llama")
    before = snapshot(model)
    patched = patch(model)
    assert patched.rows == () and "NEARLIGHT=off" in str(patched)
    assert snapshot(model) == before


@pytest.mark.parametrize("value", ["0", "OFF", "maybe"])
def test_the_switch_knows_two_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARLIGHT", value)
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(ValueError, match=f"NEARLIGHT='{value}': allowed are on, off"):
        patch(model)
    assert not is_patched(model[0])


def test_a_model_that_no_row_fits_has_a_reason() -> None:
    patched = patch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert patched.rows == () and "no module of Sequential" in patched.reason
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not str"):
        patch("model")  # type: ignore[arg-type]  # the wrong type is the point


def test_versions_never_tried_are_left_alone(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers swaps its own module object on first use
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.1")
    patched = patch(make_model("Llama"))
    assert patched.rows == () and "6.0.1 is outside the range" in str(patched)


def test_subclasses_and_replaced_forwards_are_left_alone() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    model = nn.ModuleList([Doubled(8), LlamaRMSNorm(8), LlamaRMSNorm(8)])
    model[1].forward = lambda x: 3 * x
    patched = patch(model)
    assert ops_of(patched) == {"rms_norm": 1}
    reasons = {row.module: row.reason for row in patched.skipped}
    assert "subclass of LlamaRMSNorm" in reasons["Doubled"]
    assert "replaced on this instance" in reasons["LlamaRMSNorm"]
    x = torch.randn(2, 8)
    assert torch.equal(model[0](x), 2 * LlamaRMSNorm(8)(x)) and torch.equal(model[1](x), 3 * x)


def test_another_activation_is_left_alone(make_model: Make) -> None:
    patched = patch(make_model("Llama", hidden_act="gelu"))
    assert "swiglu" not in ops_of(patched)
    assert "GELU" in patched.skipped[0].reason


def test_a_wrapper_that_calls_forward_directly_is_fused(make_model: Make, batch: Batch) -> None:
    class Wrapper(nn.Module):  # as PEFT's: hooks and __call__ of the inner model are passed by
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **kwargs: Any) -> Any:
            return self.model.forward(**kwargs)

    wrapper = Wrapper(make_model("Llama"))
    expected = wrapper(**batch).loss
    assert ops_of(patch(wrapper)) == DECODER
    output = wrapper(**batch)
    assert output.logits.shape == (2, 12, 0)
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_stay_patched_and_independent(how: str, make_model: Make, batch: Batch) -> None:
    model = make_model("Llama", tie_word_embeddings=True)
    patch(model)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert torch.equal(copied(**batch).loss, model(**batch).loss)
    unpatch(copied)
    assert copied(**batch).logits.shape == (2, 12, 97)
    assert model(**batch).logits.shape == (2, 12, 0)


def test_saves_and_loads_as_the_plain_model(make_model: Make, batch: Batch, tmp_path: Any) -> None:
    model = make_model("Llama").eval()
    expected = model(**batch).logits
    names = list(model.state_dict())
    patch(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM and not is_patched(loaded)
    assert torch.equal(loaded(**batch).logits, expected)


def test_trainer_logs_the_same(
    make_model: Make, batch: Batch, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = mock.Mock(wraps=ops.linear_cross_entropy)
    monkeypatch.setattr(ops, "linear_cross_entropy", spy)
    # Rows with unequal numbers of labels: a mean of means would show.
    data = [{key: value[i % 2] for key, value in batch.items()} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )

    def history(model: Any) -> list[float]:
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2])
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        return [log[name] for log in trainer.state.log_history for name in names if name in log]

    model = make_model("Llama")
    patch(model)
    ours = history(model)
    assert spy.call_count == 6  # three steps of two micro-batches; the evaluation takes logits
    expected = history(make_model("Llama"))
    assert len(expected) == 7  # three steps with loss and gradient norm, one evaluation
    wide = make_model("Llama").double()
    patch(wide)  # so that norms and loss stay in fp64: transformers casts them to fp32
    with backend.force("reference"):
        truth = history(wide)
    judgement = judge(*(torch.tensor(logged)[:, None] for logged in (ours, expected, truth)))
    assert judgement.passed, judgement.reason


def test_dtype_and_attention_can_change_afterwards(make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    for each in (plain, model):
        each.to(torch.bfloat16)
        each.set_attn_implementation("eager")
    comparison = compare_models(plain, model, batch)
    assert comparison.passed, comparison
    assert model(**batch).loss.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool, make_model: Make, batch: Batch) -> None:
    plain, model = make_model("Llama"), make_model("Llama")
    patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for each in (plain, model):
        each(**batch, use_cache=False).loss.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("family_compiled", ["Llama", "GPT2"])
def test_compiles_as_one_graph(family_compiled: str, make_model: Make, batch: Batch) -> None:
    plain, model = (make_model(family_compiled, num_hidden_layers=1) for _ in range(2))
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**batch).loss
    loss.backward()
    expected = plain(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert compiled(input_ids=batch["input_ids"]).logits.shape == (2, 12, 97)
    torch._dynamo.reset()


def head_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)


def activation_hook(model: Any) -> None:
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)


def another_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def eval_mode(model: Any) -> None:
    model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("change", [head_hook, activation_hook, another_activation, eval_mode])
def test_compiles_as_one_graph_where_an_op_gives_way(
    change: Callable[[Any], None], make_model: Make, batch: Batch
) -> None:
    plain, model = (make_model("Llama", num_hidden_layers=1) for _ in range(2))
    patch(model)
    change(plain)
    change(model)
    torch._dynamo.reset()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    torch.testing.assert_close(output.loss, plain(**batch).loss)
    gives_logits = change in (head_hook, eval_mode)
    assert output.logits.shape[-1] == (97 if gives_logits else 0)
    torch._dynamo.reset()


def test_unpatch_refuses_when_a_class_was_changed_on_top() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    patch(model)
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="ParametrizedLayerNorm was made from a patched"):
        unpatch(model)
    assert is_patched(model[1])
    parametrize.remove_parametrizations(model[0], "weight")
    unpatch(model)
    assert [type(module) for module in model] == [nn.LayerNorm, nn.LayerNorm]


@pytest.mark.parametrize("family_interpreted", ["Qwen3", "Phi3", "GPT2"])
def test_our_kernels_give_the_same_results(
    family_interpreted: str, make_model: Make, batch: Batch
) -> None:
    plain, model = make_model(family_interpreted), make_model(family_interpreted)
    patch(model)
    with backend.force("triton"):
        comparison = compare_models(plain, model, batch)
    assert comparison.passed, comparison

import importlib.util
import json

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.hardware import GPUS
from nearlight.profiler.target import language, load

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def bare_folder(tmp_path):
    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def full_folder(tmp_path):
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def test_folder_without_weights_gets_the_same_random_ones_each_time(bare_folder):
    target = load(bare_folder, batch=2, seq=8)
    assert not target.is_real and "random weights" in target.setup
    before = torch.random.get_rng_state()
    one, two = target.make_model(), target.make_model()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert next(one.parameters()).dtype == torch.bfloat16
    assert one.training and one.config.use_cache is False
    assert one.config._attn_implementation == "sdpa"


def test_folder_with_weights_loads_them(full_folder):
    target = load(full_folder, batch=2, seq=8, dtype="fp32")
    assert target.is_real and f"weights of {full_folder}" in target.setup
    theirs = transformers.LlamaForCausalLM.from_pretrained(full_folder)
    for ours, expected in zip(target.make_model().parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, expected)
    shaped = target.make_model(weights=False)
    assert not torch.equal(next(shaped.parameters()), next(theirs.parameters()))


def test_train_computes_the_shifted_cross_entropy(bare_folder):
    target = load(bare_folder, batch=2, seq=8, dtype="fp32")
    model, batch = target.make("cpu", True)
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert "seeded uniform token ids" in target.setup and "no attention mask" in target.setup
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].reshape(-1, 97)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1))
    torch.testing.assert_close(target.loss(model, batch), expected)


def test_prefill_gives_the_last_tokens_logits(bare_folder):
    target = load(bare_folder, task="prefill", batch=2, seq=8, dtype="fp32")
    model, batch = target.make("cpu", True)
    assert not model.training and set(batch) == {"input_ids"}
    torch.testing.assert_close(target.loss(model, batch), model(**batch).logits[:, -1:])


@pytest.mark.parametrize("family", ["LlamaConfig", "GPT2Config"])
def test_decode_continues_a_cache(tmp_path, family):
    sizes = (
        TINY
        if family == "LlamaConfig"
        else {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    )
    getattr(transformers, family)(**sizes).save_pretrained(tmp_path)
    target = load(tmp_path, task="decode", batch=2, seq=7, dtype="fp32")
    model, batch = target.make("cpu", True)
    assert batch["input_ids"].shape == (2, 1) and "one token after 7" in target.setup
    # The keys and values of a real prompt, with which the answer is known.
    prompt = torch.randint(97, (2, 8))
    cache = model(input_ids=prompt[:, :7], use_cache=True).past_key_values
    past = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
    assert past.shape == batch["past"].shape
    got = target.loss(model, {"input_ids": prompt[:, 7:], "past": past})
    torch.testing.assert_close(got, model(input_ids=prompt).logits[:, -1:])
    # ... and once more: a step must not change its own batch.
    torch.testing.assert_close(target.loss(model, {"input_ids": prompt[:, 7:], "past": past}), got)


@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_eight_billion_parameters_under_fake_tensors(task):
    with FakeTensorMode():
        target = load("llama-3.1-8b", task=task, batch=2, seq=64)
        model, batch = target.make("cpu", False)
        answer = target.loss(model, batch)
    assert isinstance(answer, FakeTensor)
    assert answer.shape == (() if task == "train" else (2, 1, 128256))


def test_tokenizer_of_the_folder_makes_the_batch(bare_folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "def": 1, "self": 2, "import": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(bare_folder / "tokenizer.json"))
    (bare_folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})
    )
    target = load(bare_folder, batch=4, seq=64)
    assert "text of Python's standard library" in target.setup
    ids = target.make_batch()["input_ids"]
    assert ids.shape == (4, 64) and set(ids.unique().tolist()) >= {0, 3}


def test_default_sizes_stop_at_what_the_model_takes(bare_folder):
    target = load(bare_folder)
    assert (target.batch, target.seq) == (8, 64)
    assert (load("llama-3.2-1b").batch, load("llama-3.2-1b").seq) == (8, 2048)
    assert load(bare_folder, task="decode").seq == 63


def test_sizes_that_make_no_sense(bare_folder):
    with pytest.raises(BadInput, match=r"seq 65: .* takes at most 64 for train"):
        load(bare_folder, seq=65)
    with pytest.raises(BadInput, match=r"seq 64: .* takes at most 63 for decode"):
        load(bare_folder, task="decode", seq=64)
    with pytest.raises(BadInput, match="at least 2 tokens"):
        load(bare_folder, seq=1)


@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_sizes_alone_take_no_memory_and_are_those_of_the_real_batch(bare_folder, task):
    target = load(bare_folder, task=task, batch=2, seq=8)
    sizes, real = target.make_batch("meta"), target.make_batch("cpu")
    assert all(tensor.device.type == "meta" for tensor in sizes.values())
    shapes = [{k: (t.shape, t.stride(), t.dtype) for k, t in b.items()} for b in (sizes, real)]
    assert shapes[0] == shapes[1]
    largest = load(bare_folder, task=task, batch=language.MAX_TOKENS // 32, seq=32)
    assert largest.make_batch("meta")["input_ids"].shape[0] == 2**23


def test_more_tokens_than_any_gpu_holds_are_refused(bare_folder):
    with pytest.raises(
        BadInput, match=r"batch 1000000000 × seq 64 is 6\.4e\+10 tokens.* at most 268"
    ):
        load(bare_folder, batch=10**9, seq=64)
    narrowest = 576 * 2 * language.MAX_TOKENS
    assert all(gpu.memory_bytes < narrowest for gpu in GPUS.values())


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_that_cannot_be_used(bare_folder, tmp_path_factory):
    with pytest.raises(BadInput, match=r"there is no config\.json in this folder"):
        load(tmp_path_factory.mktemp("empty"))
    _edit(bare_folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(BadInput, match="quantized checkpoints are not taken"):
        load(bare_folder)
    _edit(bare_folder, model_type="nothing_known")
    with pytest.raises(BadInput, match=r"config\.json: .*nothing_known") as caught:
        load(bare_folder)
    assert "\n" not in str(caught.value)
    (bare_folder / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config\.json: "):
        load(bare_folder)
    transformers.ViTConfig().save_pretrained(bare_folder)
    with pytest.raises(BadInput, match=r"ViTConfig is no causal language model.*file\.py:function"):
        load(bare_folder)


def test_weights_that_do_not_fit_are_never_filled_up(full_folder):
    from safetensors.torch import load_file, save_file

    path = full_folder / "model.safetensors"
    tensors = load_file(path)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lack 1 of .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(full_folder).make_model()
    tensors["model.layers.1.mlp.up_proj.weight"] = removed[:5].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match="its weights cannot be loaded"):
        load(full_folder).make_model()
    path.write_bytes(b"half a file")
    with pytest.raises(BadInput, match="its weights cannot be loaded"):
        load(full_folder).make_model()


def test_missing_extras_are_named_with_the_line_to_run(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        language.importlib.util,
        "find_spec",
        lambda name: None if name in ("accelerate", "gguf") else real(name),
    )
    with pytest.raises(MissingPart, match=r"accelerate, gguf.*pip install -e .*\[hf\]"):
        load("gpt2")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0", "6.0.0"])
def test_an_unfit_transformers_is_named(monkeypatch, version):
    monkeypatch.setattr(language.importlib.metadata, "version", lambda name: version)
    with pytest.raises(MissingPart, match=rf"transformers {version} is installed"):
        load("gpt2")

"""Causal language models of transformers: presets and folders with a `config.json`."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nearlight.core.errors import BadInput, MissingPart, one_line
from nearlight.core.versions import install_line
from nearlight.profiler.target import smollm2
from nearlight.profiler.target.batches import (
    RANDOM_SOURCE,
    SEED,
    TEXT_SOURCE,
    cache_like,
    random_ids,
    text_ids,
)
from nearlight.profiler.target.presets import PRESETS
from nearlight.profiler.target.quiet import no_progress_bars
from nearlight.profiler.target.record import DTYPES, Batch, LossFunction, Target, Task, task_loss

DEFAULT_BATCH = 8
DEFAULT_SEQ = 2048
# One activation of the narrowest preset (576 in bf16) is 309 GB then; beyond, sizes overflow.
MAX_TOKENS = 2**28
REAL_WEIGHTS = "smollm2-135m"
_ATTENTION_WORDS = {"sdpa": "SDPA attention", "eager": "eager attention (its softcap needs it)"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True)
class Wanted:
    """What the user asked for beside the name; None stands for a default."""

    task: Task
    batch: int | None
    seq: int | None
    dtype: str


@dataclass(frozen=True)
class _LanguageModel:
    """A model of transformers: its configuration and where weights and tokenizer come from."""

    name: str
    config: Any
    attention: str
    weights_words: str
    weights_folder: Callable[[], Path] | None
    tokenizer_folder: Callable[[], Path] | None


def preset_target(name: str, wanted: Wanted) -> Target:
    """Return the target of a preset; BadInput for sizes it cannot take, MissingPart for extras."""
    _require_hf()
    import transformers

    preset = PRESETS[name]
    config = getattr(transformers, preset.config_class)(**preset.values)
    folder = None
    words = f"random weights in the shape of {preset.source}"
    if name == REAL_WEIGHTS:
        # Asked before anything long starts; the conversion itself waits until it is needed.
        smollm2.find_gguf()
        folder = smollm2.cached_folder
        words = f"real weights of {preset.source} (Q4_1, dequantized)"
    return _target(_LanguageModel(name, config, preset.attention, words, folder, folder), wanted)


def folder_target(folder: Path, wanted: Wanted) -> Target:
    """Return the target of a folder with a `config.json`, and safetensors where it has weights."""
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: there is no config.json in this folder")
    _require_hf()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BadInput(f"{folder}/config.json: {one_line(error)}") from error
    # The public way to ask is to build the model and catch what comes.
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise BadInput(
            f"{folder}: {type(config).__name__} is no causal language model of transformers; "
            "write a function that returns (model, batch) and name it as file.py:function"
        )
    if getattr(config, "quantization_config", None):
        raise BadInput(f"{folder}: quantized checkpoints are not taken; dequantize it first")
    has_weights = any(folder.glob("*.safetensors"))
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZER_FILES)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    model = _LanguageModel(
        name=str(folder),
        config=config,
        attention=attention,
        weights_words=f"weights of {folder}" if has_weights else "random weights (none in folder)",
        weights_folder=(lambda: folder) if has_weights else None,
        tokenizer_folder=(lambda: folder) if has_tokenizer else None,
    )
    return _target(model, wanted)


def _target(model: _LanguageModel, wanted: Wanted) -> Target:
    batch, seq = _sizes(model, wanted)
    sized = replace(wanted, batch=batch, seq=seq)
    build = partial(_build, model, sized)
    inputs = partial(_inputs, model, sized)
    ids_words = RANDOM_SOURCE if model.tokenizer_folder is None else TEXT_SOURCE
    if wanted.task == "decode":
        ids_words = f"one token after {seq} in the cache"
    parts = (
        model.weights_words,
        f"{ids_words}, no attention mask",
        f"batch {batch} × {1 if wanted.task == 'decode' else seq}",
        wanted.dtype,
        _ATTENTION_WORDS[model.attention],
        f"task {wanted.task}",
    )
    return Target(
        name=model.name,
        task=wanted.task,
        setup=", ".join(parts),
        batch=batch,
        seq=seq,
        dtype=wanted.dtype,
        is_real=model.weights_folder is not None,
        make=lambda device, weights: (build(device, weights), inputs(device)),
        model_only=build,
        batch_only=inputs,
        loss_fn=_decode if wanted.task == "decode" else _plain_loss(wanted.task, model.name),
    )


def _sizes(model: _LanguageModel, wanted: Wanted) -> tuple[int, int]:
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # The decoded token has a position of its own.
    longest = positions - (wanted.task == "decode") if positions else None
    seq = wanted.seq if wanted.seq is not None else min(DEFAULT_SEQ, longest or DEFAULT_SEQ)
    if longest is not None and seq > longest:
        raise BadInput(f"seq {seq}: {model.name} takes at most {longest} for {wanted.task}")
    if wanted.task == "train" and seq < 2:
        raise BadInput(f"seq {seq}: training needs at least 2 tokens, a token and the next one")
    batch = wanted.batch or DEFAULT_BATCH
    if batch * seq > MAX_TOKENS:
        raise BadInput(
            f"batch {batch} × seq {seq} is {batch * seq:.1e} tokens, more than any GPU holds; "
            f"at most {MAX_TOKENS} are taken"
        )
    return batch, seq


def _build(model: _LanguageModel, wanted: Wanted, device: str, weights: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[wanted.dtype]
    auto: Any = AutoModelForCausalLM  # typed in part only
    made: Any = None
    if weights and model.weights_folder is not None:
        made = _pretrained(model, model.weights_folder(), dtype).to(device)
    else:
        with _seeded(device), torch.device(device):
            # from_config writes into the configuration it is given.
            made = auto.from_config(
                copy.deepcopy(model.config), dtype=dtype, attn_implementation=model.attention
            )
    if made.loss_type is None:
        # What transformers takes then anyway, with a warning (GPT-2's class name tells it nothing).
        made.loss_type = "ForCausalLM"
    made.config.use_cache = wanted.task != "train"
    made.train(wanted.task == "train")
    return cast(nn.Module, made)


def _pretrained(model: _LanguageModel, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # typed in part only
    try:
        with no_progress_bars():
            made, info = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=model.attention,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise BadInput(f"{folder}: its weights cannot be loaded: {one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        # transformers would go on with random values in their place.
        raise BadInput(
            f"{folder}: its safetensors lack {len(missing)} of the model's tensors "
            f"({missing[0]}, ...)"
        )
    return made


@contextmanager
def _seeded(device: str) -> Iterator[None]:
    """Seed the random state for the block: random weights are the same each time."""
    # A trace may name a device that this machine does not have.
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    with torch.random.fork_rng(devices=[torch.device(device)] if on_gpu else []):
        torch.manual_seed(SEED)
        yield


def _inputs(model: _LanguageModel, wanted: Wanted, device: str) -> Batch:
    assert wanted.batch is not None and wanted.seq is not None  # set by _target
    num_new = 1 if wanted.task == "decode" else wanted.seq
    ids = _token_ids(model, wanted.batch, num_new, device)
    if wanted.task == "train":
        # transformers shifts the labels itself.
        return {"input_ids": ids, "labels": ids.clone()}
    if wanted.task == "prefill":
        return {"input_ids": ids}
    cache = cache_like(model.config, wanted.batch, wanted.seq, DTYPES[wanted.dtype], device)
    return {"input_ids": ids, "past": cache}


def _token_ids(model: _LanguageModel, batch: int, num_new: int, device: str) -> torch.Tensor:
    if torch.device(device).type == "meta":  # a trace asks for sizes, not values
        return torch.empty((batch, num_new), dtype=torch.int64, device=device)
    vocab_size = model.config.get_text_config().vocab_size
    if model.tokenizer_folder is None:
        return random_ids(batch, num_new, vocab_size).to(device)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_folder(), local_files_only=True)
    try:
        return text_ids(tokenizer, batch, num_new, vocab_size).to(device)
    except ValueError as error:
        raise BadInput(f"{model.name}: {error}") from None


def _plain_loss(task: str, name: str) -> LossFunction:
    if task == "train":
        return task_loss(task, None, name)
    # A prompt needs the logits of its last token only, as generate() asks for.
    return lambda model, batch: model(**batch, logits_to_keep=1).logits


def _decode(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Run one token after the cached ones: keys and values of `past`, layer by layer."""
    from transformers import DynamicCache

    past = batch["past"]
    cache: Any = DynamicCache()
    for layer, (keys, values) in enumerate(past):
        # Updating an empty layer with all of it would copy what a running program has there
        # already; the empty update makes the layer.
        cache.update(keys[..., :0, :], values[..., :0, :], layer)
        cache.layers[layer].keys, cache.layers[layer].values = keys, values
    # transformers renamed the argument between the versions supported.
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    logits: torch.Tensor = model(input_ids=batch["input_ids"], **{name: cache}).logits
    return logits


def _require_hf() -> None:
    needed = ("transformers", "accelerate", "safetensors", "tokenizers", "gguf")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPart(
            f"models need {', '.join(missing)}, not installed here: {install_line('hf')}"
        )
    version = importlib.metadata.version("transformers")
    if not (5, 17) <= tuple(int(part) for part in version.split(".")[:2]) < (6, 0):
        raise MissingPart(
            f"transformers {version} is installed, nearlight needs 5.17 or later of 5.x: "
            f"{install_line('hf')}"
        )

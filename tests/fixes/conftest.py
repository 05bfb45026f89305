"""Tiny models of transformers, their targets, and fixes with planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from nearlight.fixes.fix import Fix, NothingToDo, Undo
from nearlight.profiler.target import Target, from_model

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS: dict[str, dict[str, object]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    # Dropout stays on, as in the published configuration.
    "GPT2": {},
}
CLASSES = {"GPT2": "GPT2LMHeadModel"}


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    def make(family: str = "Llama", **options: object) -> nn.Module:
        config = getattr(transformers, f"{family}Config")(**COMMON | OPTIONS[family] | options)
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
        with torch.no_grad():  # norms start as ones, biases as zeros: give every weight a part
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.loss_type = "ForCausalLM"
        return model.train()

    return make


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def make_target(
    make_model: Callable[..., nn.Module], batch: dict[str, torch.Tensor]
) -> Callable[..., Target]:
    def make(family: str = "Llama", task: str = "train", **options: object) -> Target:
        inputs = batch if task == "train" else {"input_ids": batch["input_ids"]}
        return from_model(make_model(family, **options), inputs, task)

    return make


Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def fault() -> Callable[[str, Change], Fix]:
    """Make a fix that is none: it changes the output of one part of the model."""

    def make(part: str, change: Change) -> Fix:
        def apply(model: nn.Module) -> Undo:
            found = [m for name, m in model.named_modules() if name.endswith(part)]
            if not found:
                raise NothingToDo(f"no {part} here")
            handles = [m.register_forward_hook(lambda m, a, out: change(out)) for m in found]

            def undo() -> None:
                for handle in handles:
                    handle.remove()

            return undo

        return Fix(f"fault:{part}", "exact", apply)

    return make

"""Batches of token ids: real text where there is a tokenizer, seeded random ids where not."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SEED = 0
TEXT_SOURCE = "text of Python's standard library"
RANDOM_SOURCE = "seeded uniform token ids (no tokenizer)"


def text_ids(tokenizer: Any, batch: int, seq: int, vocab_size: int) -> torch.Tensor:
    """Return token ids (batch, seq), int64, of Python's own library sources, file after file."""
    wanted = batch * seq
    ids: list[int] = []
    for text in _library_sources():
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= wanted:
            break
    if not ids:
        raise ValueError("the tokenizer makes no tokens of Python's standard library")
    # A batch larger than the library reads it again from the start.
    ids = (ids * -(-wanted // len(ids)))[:wanted]
    if max(ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer has token id {max(ids)}, the model's vocabulary ends at {vocab_size}"
        )
    return torch.tensor(ids, dtype=torch.int64).view(batch, seq)


def random_ids(batch: int, seq: int, vocab_size: int) -> torch.Tensor:
    """Return seeded uniform token ids (batch, seq), int64."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (batch, seq), generator=generator)


def cache_like(config: Any, batch: int, seq: int, dtype: torch.dtype) -> torch.Tensor:
    """Return keys and values of `seq` past tokens: (layers, 2, batch, kv heads, seq, head dim)."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    shape = (text.num_hidden_layers, 2, batch, kv_heads, seq, head_dim)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator).to(dtype)


def _library_sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")

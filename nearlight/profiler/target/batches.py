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
    if max(ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer has token id {max(ids)}, the model's vocabulary ends at {vocab_size}"
        )
    # A batch larger than the library reads it again from the start.
    repeats = -(-wanted // len(ids))
    return torch.tensor(ids, dtype=torch.int64).repeat(repeats)[:wanted].view(batch, seq)


def random_ids(batch: int, seq: int, vocab_size: int) -> torch.Tensor:
    """Return seeded uniform token ids (batch, seq), int64."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (batch, seq), generator=generator)


def cache_like(
    config: Any, batch: int, seq: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Return keys and values of `seq` past tokens: (layers, 2, batch, kv heads, seq, head dim).

    They are seeded normal numbers; on the device "meta" there are none, only their sizes.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    shape = (text.num_hidden_layers, 2, batch, kv_heads, seq, head_dim)
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _library_sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")

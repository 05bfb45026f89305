from types import SimpleNamespace

import pytest
import torch

from nearlight.profiler.target import batches
from nearlight.profiler.target.batches import cache_like, random_ids, text_ids


def characters(text, add_special_tokens):
    assert add_special_tokens is False
    return {"input_ids": [min(ord(letter), 255) for letter in text]}


def test_text_is_the_standard_library_in_order():
    ids = text_ids(characters, 2, 300, vocab_size=256)
    assert ids.shape == (2, 300) and ids.dtype == torch.int64
    text = next(iter(batches._library_sources()))
    assert "".join(map(chr, ids.flatten().tolist())) == text[:600]


def test_a_large_batch_reads_the_library_again(monkeypatch):
    monkeypatch.setattr(batches, "_library_sources", lambda: iter(["abc", "de"]))
    ids = text_ids(characters, 2, 4, vocab_size=256)
    assert "".join(map(chr, ids.flatten().tolist())) == "abcdeabc"


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match="vocabulary ends at 90"):
        text_ids(characters, 1, 500, vocab_size=90)
    with pytest.raises(ValueError, match="no tokens"):
        text_ids(lambda text, add_special_tokens: {"input_ids": []}, 1, 5, vocab_size=90)


def test_random_ids_are_seeded_uniform_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    ids = random_ids(4, 5000, 10)
    assert torch.equal(ids, random_ids(4, 5000, 10))
    assert torch.equal(before, torch.random.get_rng_state())
    counts = torch.bincount(ids.flatten(), minlength=10)
    assert counts.shape == (10,) and (counts > 1800).all() and (counts < 2200).all()


def test_cache_has_the_shape_of_grouped_heads():
    text = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=2, hidden_size=64, num_hidden_layers=3
    )
    config = SimpleNamespace(get_text_config=lambda: text)
    assert cache_like(config, 5, 7, torch.float32).shape == (3, 2, 5, 2, 7, 8)
    text.head_dim = 16
    assert cache_like(config, 5, 7, torch.bfloat16).shape == (3, 2, 5, 2, 7, 16)
    assert cache_like(config, 5, 7, torch.bfloat16).dtype == torch.bfloat16

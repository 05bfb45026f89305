import torch
from transformers import masking_utils as masking

from nearlight.profiler.capture import trace
from nearlight.profiler.target import from_model

ATTENTION = "aten::scaled_dot_product_attention"


def attention_of(target):
    return next(call for call in trace(target).calls if call.name == ATTENTION)


def test_without_padding_attention_is_causal_and_keys_are_not_repeated(make_llama):
    for mask in (None, torch.ones(4, 64, dtype=torch.long)):
        call = attention_of(make_llama(mask=mask))
        assert call.cost.attention.is_causal
        assert call.inputs[1].shape == (4, 2, 64, 16)  # two key heads for four query heads
        assert len(call.inputs) == 3  # no mask


def test_padding_brings_the_mask_back(make_llama):
    mask = torch.ones(4, 64, dtype=torch.long)
    mask[0, 0] = 0
    call = attention_of(make_llama(mask=mask))
    assert not call.cost.attention.is_causal
    assert call.inputs[3] == ((4, 1, 64, 64), torch.bool)


def test_packed_sequences_bring_the_mask_back(make_llama):
    plain = make_llama()
    positions = torch.arange(64).remainder(16).expand(4, 64)
    batch = {**plain.make_batch("cpu"), "position_ids": positions}
    call = attention_of(from_model(plain.make_model("cpu"), batch))
    assert not call.cost.attention.is_causal and len(call.inputs) == 4


def test_the_wait_for_the_answer_belongs_to_the_step(make_llama):
    step = trace(make_llama())
    assert step.num_host_syncs == 1


def test_transformers_is_left_as_it_was(make_llama):
    names = ("is_tracing", "find_packed_sequence_indices", "_ignore_causal_mask_sdpa")
    before = [getattr(masking, name) for name in names]
    trace(make_llama(mask=torch.ones(4, 64, dtype=torch.long)))
    assert [getattr(masking, name) for name in names] == before

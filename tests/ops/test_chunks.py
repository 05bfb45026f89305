from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearlight.ops._chunks import (
    LARGEST_DEFAULT_BYTES,
    MAX_ROUNDED_SUMS,
    TILE_ROWS,
    chunk_rows,
    plan,
    row_pitch,
)

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 2**20


@given(
    rows=st.integers(0, 200_000),
    vocab=st.integers(1, 262_144),
    dtype=st.sampled_from([BF16, torch.float16, FP32, torch.float64]),
    budget_mib=st.integers(1, 4096),
)
def test_chunk_fits_the_budget_covers_all_rows_and_ends_on_a_tile(rows, vocab, dtype, budget_mib):
    budget_bytes = budget_mib * MIB
    row_bytes = row_pitch(vocab) * dtype.itemsize
    if min(rows, TILE_ROWS) * row_bytes > budget_bytes:
        with pytest.raises(ValueError, match="memory_budget_bytes"):
            chunk_rows(rows, vocab, dtype, budget_bytes)
        return
    size = chunk_rows(rows, vocab, dtype, budget_bytes)
    assert size * row_bytes <= budget_bytes
    assert size == rows or (0 < size < rows and size % TILE_ROWS == 0)
    if size < rows:  # no more chunks than the budget needs
        most = budget_bytes // row_bytes // TILE_ROWS * TILE_ROWS
        assert -(-rows // size) == -(-rows // most)


@given(
    rows=st.integers(1, 200_000),
    vocab=st.integers(1, 262_144),
    hidden=st.integers(1, 16_384),
    dtype=st.sampled_from([BF16, torch.float16, FP32]),
    budget_mib=st.none() | st.integers(1, 8192),
)
def test_plan_keeps_its_budget_and_the_bound_on_rounded_sums(
    rows, vocab, hidden, dtype, budget_mib
):
    budget_bytes = None if budget_mib is None else budget_mib * MIB
    try:
        steps = plan(rows, vocab, hidden, dtype, True, budget_bytes)
    except ValueError as error:
        assert budget_bytes is not None or dtype == FP32
        least = int(str(error).split("allowed are ")[1].split()[0])
        assert plan(rows, vocab, hidden, dtype, True, least).workspace_bytes <= least
        return
    assert budget_bytes is None or steps.workspace_bytes <= budget_bytes
    assert steps.rows * steps.num_chunks >= rows > steps.rows * (steps.num_chunks - 1)
    if dtype != FP32 and not steps.product_columns:
        assert steps.num_chunks <= MAX_ROUNDED_SUMS


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "num_chunks", "limit_mib"),
    [
        (8192, 4096, 128256, 4, 600),
        (32768, 4096, 128256, 4, 2048),
        (16384, 2048, 151936, 4, 1216),
        (16384, 768, 50257, 4, 512),
    ],
)
def test_default_sums_in_the_products_at_the_sizes_of_language_models(
    rows, hidden, vocab, num_chunks, limit_mib
):
    steps = plan(rows, vocab, hidden, BF16, True)
    assert (steps.num_chunks, steps.product_columns) == (num_chunks, 0)
    assert steps.workspace_bytes <= limit_mib * MIB


def test_many_rows_or_a_small_budget_take_the_24_bit_sum():
    steps = plan(131_072, 128_256, 4096, BF16, True)
    assert steps.product_columns == 2048
    assert steps.workspace_bytes < LARGEST_DEFAULT_BYTES
    steps = plan(32_768, 128_256, 4096, BF16, True, 1200 * MIB)
    assert (steps.product_columns, steps.num_chunks) == (2048, 13)


def test_without_a_weight_gradient_nothing_is_summed():
    steps = plan(131_072, 128_256, 4096, BF16, False, 256 * MIB)
    assert steps.product_columns == 0
    assert steps.workspace_bytes <= 256 * MIB


def test_rows_of_logits_start_aligned():
    assert [row_pitch(vocab) for vocab in (1, 64, 50_257, 128_256)] == [64, 64, 50_304, 128_256]

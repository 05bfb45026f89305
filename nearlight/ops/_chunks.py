"""How many rows of logits exist at once, and how the weight gradient is summed over the chunks.

Two ways keep the sum of a half-precision weight gradient within the tolerance rule:

* up to MAX_ROUNDED_SUMS chunks are summed by the matrix product itself, into the gradient. Each
  sum rounds once, by half a unit in the last place at most: four of them fill the two units that
  the rule allows every op, and cost no memory and no time (not below fp16's smallest normal
  number, 6e-5, where plain PyTorch's one rounding is half a unit, too: the loss scale keeps
  gradients above);
* more chunks are summed in 24 bits: the gradient holds the upper 16 and a buffer of one byte per
  weight the lower 8. A sum then errs by 1/512 of a unit, so that a thousand chunks stay within
  two. That takes a pass over the gradient per chunk (about 1 ms per GB of weights on an H200).

So the first way is taken while the memory lasts, with larger chunks if need be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# cuBLAS's tiles are 128 rows high: a chunk that ends inside one wastes the rest of it.
TILE_ROWS = 128
# Rows of the logits start at multiples of this many elements: a vocabulary of 50,257 would
# otherwise leave every row misaligned, and cuBLAS and Triton without 16-byte accesses.
PITCH_ELEMENTS = 64
MAX_ROUNDED_SUMS = 4

# Logits that are enough for matrix products at full speed (2048 rows of a vocabulary of 128,256).
DEFAULT_BYTES = 512 * 2**20
# Up to here larger chunks are preferred to the 24-bit sum, which costs time.
LARGEST_DEFAULT_BYTES = 2 * 2**30
# Chunks for the 24-bit sum: its pass over the gradient is paid once per chunk.
SPLIT_SUM_BYTES = 2**30
# The fp32 product of a chunk that the 24-bit sum takes in: small enough to stay in L2.
PRODUCT_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Plan:
    """How a call goes through its rows.

    Attributes:
        rows: rows of a chunk.
        num_chunks: chunks of the call.
        product_columns: vocabulary columns per product of the 24-bit sum; 0 where the matrix
            product sums into the gradient itself.
        workspace_bytes: device memory for the chunk and the sum.
    """

    rows: int
    num_chunks: int
    product_columns: int
    workspace_bytes: int


def row_pitch(vocab: int) -> int:
    """Return the elements from one row of logits to the next."""
    return -(-vocab // PITCH_ELEMENTS) * PITCH_ELEMENTS


def chunk_rows(rows: int, vocab: int, dtype: torch.dtype, budget_bytes: int) -> int:
    """Return the rows of a chunk: as few chunks as the budget allows, all about equally large.

    Args:
        rows: rows of the call.
        vocab: columns of the logits.
        dtype: dtype of the logits.
        budget_bytes: memory for the logits of a chunk.

    Raises:
        ValueError: the budget does not hold the smallest chunk.
    """
    most = budget_bytes // (row_pitch(vocab) * dtype.itemsize)
    if rows <= most:
        return rows
    most = most // TILE_ROWS * TILE_ROWS
    if most == 0:
        least = _bytes(TILE_ROWS, vocab, dtype)
        raise ValueError(_too_small(rows, vocab, dtype, budget_bytes, least))
    return _tiles(rows, -(-rows // most))


def plan(
    rows: int,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    needs_weight: bool,
    budget_bytes: int | None = None,
) -> Plan:
    """Choose the chunks of a call.

    Args:
        rows: rows of the call.
        vocab: columns of the logits.
        hidden: width of x and of the weight.
        dtype: dtype of x, the weight and the logits.
        needs_weight: whether the weight gradient is summed over the chunks.
        budget_bytes: memory for everything the call allocates beside its outputs and a few
            vectors of one value per row; None leaves the choice to this function.

    Raises:
        ValueError: the budget is too small; the message says the least that works.
    """
    if not needs_weight or dtype.itemsize > 2:
        # fp32 and fp64 sums round far below the output's own error.
        size = chunk_rows(rows, vocab, dtype, budget_bytes or DEFAULT_BYTES)
        return _plan(rows, size, vocab, dtype)
    rounded_bytes = _bytes(_tiles(rows, MAX_ROUNDED_SUMS), vocab, dtype)
    if rounded_bytes <= (budget_bytes or LARGEST_DEFAULT_BYTES):
        logits_bytes = budget_bytes or max(DEFAULT_BYTES, rounded_bytes)
        return _plan(rows, chunk_rows(rows, vocab, dtype, logits_bytes), vocab, dtype)
    columns, sum_bytes = _split_sum(vocab, hidden)
    logits_bytes = SPLIT_SUM_BYTES if budget_bytes is None else budget_bytes - sum_bytes
    smallest_bytes = _bytes(TILE_ROWS, vocab, dtype)
    if dtype != torch.bfloat16 or logits_bytes < smallest_bytes:
        # fp16 has no 16 upper bits of an fp32: it takes the first way or none.
        least = rounded_bytes
        if dtype == torch.bfloat16:
            least = min(least, sum_bytes + smallest_bytes)
        if budget_bytes is not None:
            raise ValueError(_too_small(rows, vocab, dtype, budget_bytes, least))
        return _plan(rows, _tiles(rows, MAX_ROUNDED_SUMS), vocab, dtype)
    size = chunk_rows(rows, vocab, dtype, logits_bytes)
    return _plan(rows, size, vocab, dtype, columns, sum_bytes)


def _split_sum(vocab: int, hidden: int) -> tuple[int, int]:
    """Return the columns per product of the 24-bit sum, and the bytes it needs."""
    columns = min(vocab, max(256, PRODUCT_BYTES // (4 * hidden) // 256 * 256))
    return columns, vocab * hidden + columns * hidden * 4


def _plan(
    rows: int, size: int, vocab: int, dtype: torch.dtype, columns: int = 0, sum_bytes: int = 0
) -> Plan:
    num_chunks = -(-rows // size) if rows else 0
    return Plan(size, num_chunks, columns, _bytes(size, vocab, dtype) + sum_bytes)


def _tiles(rows: int, num_chunks: int) -> int:
    """Return the rows per chunk for so many chunks, rounded up to whole tiles."""
    return min(rows, -(-rows // num_chunks // TILE_ROWS) * TILE_ROWS) if rows else 0


def _bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    return rows * row_pitch(vocab) * dtype.itemsize


def _too_small(rows: int, vocab: int, dtype: torch.dtype, given: int, least: int) -> str:
    least = min(least, _bytes(rows, vocab, dtype))
    return (
        f"memory_budget_bytes={given} is too small for {rows} rows of {vocab} logits in {dtype}: "
        f"allowed are {least} and more, or None"
    )

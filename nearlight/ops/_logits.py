"""Kernels on rows of logits that several ops share: tiles, their launch rule, the 24-bit sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from nearlight.core.hardware import Gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.triton import jit
from nearlight.core.tuned import tunable


@dataclass(frozen=True)
class Config:
    """A program's tile and its warps."""

    block_m: int
    block_n: int
    num_warps: int


def candidates(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, has_softcap: bool
) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `tunable_config`."""
    if gpu is None:
        return {}
    widest = triton.next_power_of_2(shape[1])
    blocks = [block_n for block_n in (1024, 2048, 4096, 8192, 16384) if block_n <= widest]
    return {
        Config(1, block_n, num_warps): ""
        if block_n <= 2048 * num_warps
        else "over 64 elements per thread"
        for block_n, num_warps in product(blocks, (4, 8, 16))
    }


def tunable_config(op: str, capped_block: int = 4096) -> Callable[..., Config]:
    """Return the launch rule of one op, with the tuned rows of that op before it.

    Args:
        op: name of the op.
        capped_block: columns that 8 warps hold of logits with a softcap, which takes registers.
    """

    @tunable(op, candidates)
    def config(
        shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, has_softcap: bool
    ) -> Config:
        """Choose the tile for (rows, vocabulary), or for the interpreter where `gpu` is None."""
        rows, vocab = shape
        widest = triton.next_power_of_2(vocab)
        if gpu is None:  # a program costs the same whatever its tile
            block_n = min(widest, 16384)
            return Config(min(triton.next_power_of_2(rows), 2**17 // block_n), block_n, 4)
        # Measured on an H200: 8192 is best for 32,000 columns, 4096 for 128,256, both with 8 warps.
        block_n = capped_block if has_softcap else 8192 if vocab <= 65536 else 4096
        per_warp = min(block_n // 8, 512)
        block_n = min(widest, block_n, 2048 if dtype == torch.float64 else block_n)
        return Config(1, block_n, max(1, min(8, block_n // per_warp)))

    return config


@jit
def _tanh(x, ACC: tl.constexpr):
    """Return tanh and its derivative; `tl` has none, and the interpreter no libdevice."""
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    tanh = (1.0 - decay) / (1.0 + decay)
    if ACC == tl.float32:
        # 1 − decay cancels for small x: there the series, to 1e-8 of tanh.
        s = x * x
        series = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
        tanh = tl.where(size < 0.25, size * series, tanh)
    # Not 1 − tanh², which cancels where the cap bites.
    slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return tl.where(x < 0, -tanh, tanh), slope


@jit
def final_logits(raw, ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the final logits of a tile, and the derivative of the cap."""
    logits = raw.to(ACC)
    slope = logits
    if SCALE != 1.0:
        logits = logits * SCALE
    if SOFTCAP is not None:
        bent, slope = _tanh(logits / SOFTCAP, ACC)
        logits = bent * SOFTCAP
    return logits, slope


@jit
def transform(raw, mask, ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return `final_logits`, −inf outside `mask`."""
    logits, slope = final_logits(raw, ACC, SCALE, SOFTCAP)
    return tl.where(mask, logits, -float("inf")), slope


@jit
def load_tile(
    row_ptr, row_mask, start, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a tile's columns, its pointers, what may be accessed, what exists, its logits."""
    cols = start + tl.arange(0, BLOCK_N)
    pointers = row_ptr[:, None] + cols[None, :]
    access = row_mask[:, None] & (cols < width)[None, :]
    mask = row_mask[:, None] & (cols < N)[None, :]
    raw = tl.load(pointers, access, other=0.0)
    logits, cap_slope = transform(raw, mask, ACC, SCALE, SOFTCAP)
    return cols, pointers, access, mask, logits, cap_slope


@jit
def target_terms(target, maximum, rest):
    """Return exp(z_t − z*), Σ exp(z − z*), its logarithm, and −log p of the target.

    The target is kept out of the sum of the rest: of a confident row, loss and gradient are made
    of the rest alone, and 1 − p would cancel all its digits.
    """
    target_share = tl.exp(target - maximum)
    total = target_share + rest
    log_total = tl.log(total)
    excess = total - 1.0
    log1p_rest = tl.where(excess == 0.0, rest, log_total * (rest / excess))
    target_loss = tl.where(target == maximum, log1p_rest, log_total - (target - maximum))
    return target_share, total, log_total, target_loss


def flat_block(tensor: torch.Tensor, gpu_block: int) -> int:
    """Return the elements per program of a flat kernel; few large programs when interpreted."""
    if launch_gpu(tensor.device) is None:
        return min(triton.next_power_of_2(tensor.numel()), 2**17)
    return gpu_block


# A program's elements. With 4096 the 24-bit sum of a size that is no multiple of 16 takes up to 118
# registers, and its last one spills on sm_120 (Triton 3.7.1); with 2048 it takes 34 at most.
SPLIT_BLOCK = 2048


@jit
def _split_add_kernel(
    upper_ptr, lower_ptr, product_ptr, N,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    total = tl.load(product_ptr + offsets, mask, other=0.0)
    if not IS_FIRST:
        upper = tl.load(upper_ptr + offsets, mask, other=0.0).to(tl.int16, bitcast=True)
        lower = tl.load(lower_ptr + offsets, mask, other=0).to(tl.int32)
        bits = (upper.to(tl.int32) << 16) | (lower << 8)
        total += bits.to(tl.float32, bitcast=True)
    if IS_LAST:
        tl.store(upper_ptr + offsets, total.to(tl.bfloat16), mask)
    else:
        bits = total.to(tl.int32, bitcast=True)
        # Round to 24 bits; the all-ones NaN would wrap around to −0.
        bits = tl.where(total == total, bits + 0x80, bits)
        upper = (bits >> 16).to(tl.int16)
        tl.store(upper_ptr + offsets, upper.to(tl.bfloat16, bitcast=True), mask)
        tl.store(lower_ptr + offsets, ((bits >> 8) & 0xFF).to(tl.uint8), mask)


def split_add_(
    upper: torch.Tensor,
    lower: torch.Tensor,
    product: torch.Tensor,
    is_first: bool = False,
    is_last: bool = False,
) -> None:
    """Add a product to a sum of 24 bits: `upper` holds the first 16, `lower` the last 8.

    Args:
        upper: bf16, contiguous; after the last call the sum, rounded to bf16.
        lower: uint8, contiguous, as many elements.
        product: fp32, contiguous, as many elements.
        is_first: the sum starts here: what `upper` and `lower` hold is not read.
        is_last: the sum ends here: `lower` is not written.
    """
    assert upper.numel() == lower.numel() == product.numel()
    block = flat_block(upper, SPLIT_BLOCK)
    _split_add_kernel[(triton.cdiv(upper.numel(), block),)](
        upper,
        lower,
        product,
        upper.numel(),
        IS_FIRST=is_first,
        IS_LAST=is_last,
        BLOCK=block,
        num_warps=8,
    )

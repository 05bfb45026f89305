from __future__ import annotations

import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.ops._logits import Config, split_add_, tunable_config

config = tunable_config("some op over logits")


@pytest.mark.parametrize("num_chunks", [1, 2, 300])
def test_24_bit_sum_does_not_stagnate(num_chunks: int):
    # After the first product each further one is below half a unit of bf16: a sum in bf16 would
    # stay at the first.
    generator = torch.Generator().manual_seed(num_chunks)
    first = torch.randn(1000, generator=generator)
    rest = first * 2.0**-9 * 0.9
    upper = torch.full((1000,), torch.nan, dtype=torch.bfloat16)
    lower = torch.empty(1000, dtype=torch.uint8)
    truth = torch.zeros(1000, dtype=torch.float64)
    for index in range(num_chunks):
        product = first if index == 0 else rest
        truth += product
        split_add_(upper, lower, product, index == 0, index == num_chunks - 1)
    # Rounded once at the end, plus the 24-bit sums' own error.
    bound = truth.abs() * (2.0**-8 + num_chunks * 2.0**-16)
    error = upper.double() - truth
    assert (error.abs() <= bound).all()
    assert (error / truth).mean().abs() < 2.0**-12  # rounded, not cut off


def test_24_bit_sum_keeps_infinities_and_nan():
    product = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 3.0e38])
    product.view(torch.int32)[2] = 0x7FFFFFFF  # the NaN a GPU makes
    upper, lower = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.uint8)
    split_add_(upper, lower, product, is_first=True)
    split_add_(upper, lower, torch.zeros(6), is_last=True)
    torch.testing.assert_close(upper, product.bfloat16(), equal_nan=True)


def test_config_fills_vectors_and_warps():
    bf16, gpu = torch.bfloat16, find_gpu("h200")
    assert config((8192, 128_256), bf16, gpu, False).block_n == 4096
    assert config((8192, 32_000), bf16, gpu, False).block_n == 8192
    assert config((8192, 32_000), bf16, gpu, True).block_n == 4096
    for vocab in (1, 7, 513, 262_144):
        tile = config((8192, vocab), bf16, gpu, False)
        assert tile.block_m == 1
        assert tile.num_warps <= 8
        assert config((70_000, vocab), bf16, None, False).block_m >= 8
    capped = tunable_config("another op over logits", capped_block=2048)
    assert capped((8192, 128_256), bf16, gpu, True) == Config(1, 2048, 8)
    assert capped((8192, 128_256), bf16, gpu, False) == config((8192, 128_256), bf16, gpu, False)

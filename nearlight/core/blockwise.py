"""Eight-bit optimizer states in blocks of 256: the exact format, in plain torch.

A block is scaled by its largest magnitude. A code c - 1 with c = 2^j (1 + t), 0 <= t < 1, stands
for (1 + 7 t) * 8^(j - J): numbers are spaced evenly between powers of eight, most finely next to
the block's largest, and every one is exact in fp32. J is 7 beside a sign bit, 8 without a sign;
code 0 is 0. A positive number without a sign never becomes 0, or a second moment would divide by 0.

A state is one uint8 tensor: the codes of all blocks, then their scales as fp32.
Source: the idea of a map whose exponent grows in its leading zeros is Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861); powers of eight, not of ten, make
it computable without a table.
Limits: NaN or infinity in a block makes its scale infinite, so that all of it decodes to NaN or
infinity.
"""

from __future__ import annotations

import torch

BLOCK = 256
# A block's bytes: its codes and its scale.
BLOCK_BYTES = BLOCK + 4


def state_bytes(numel: int) -> int:
    """Return the length of the uint8 tensor that holds a state of so many elements."""
    return -(-numel // BLOCK) * BLOCK_BYTES


def decode(codes: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the fp32 numbers within [-1, 1] of uint8 codes."""
    top = 7 if is_signed else 8
    whole = codes.to(torch.int32)
    body = whole & 127 if is_signed else whole
    mantissa, exponent = torch.frexp((body + 1).float())  # mantissa within [0.5, 1)
    value = torch.ldexp(14 * mantissa - 6, 3 * (exponent - 1 - top))
    value = torch.where(body == 0, 0.0, value)
    return torch.where(whole >= 128, -value, value) if is_signed else value


def encode(x: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the uint8 codes nearest to fp32 numbers within [-1, 1]; others saturate."""
    top = 7 if is_signed else 8
    y = x.abs()
    y = torch.where(y <= 1, y, 1.0)  # NaN, too
    j = top + torch.div(torch.frexp(y).exponent - 1, 3, rounding_mode="floor")
    j = j.clamp(0, top)
    c = torch.ldexp(1 + (torch.ldexp(y, 3 * (top - j)) - 1) / 7, j)
    is_least = (j < 1) | (y == 0)
    body = torch.where(is_least, (y * 8.0 ** (top - 1) + 0.5).floor(), (c - 0.5).floor())
    body = body.to(torch.int32).clamp_max((1 << top) - 1)
    if not is_signed:
        return body.clamp_min((y > 0).to(torch.int32)).to(torch.uint8)
    return (body | torch.where(torch.signbit(x), 128, 0)).to(torch.uint8)


def pack(x: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Quantize a flat tensor.

    Args:
        x: (N,) floating.
        is_signed: False for second moments, which are never negative.

    Returns:
        uint8 (`state_bytes(N)`,).

    Example:
        >>> import torch
        >>> unpack(pack(torch.tensor([1.0, -0.125, 0.0]), True), 3, True)
        tensor([ 1.0000, -0.1250,  0.0000])
    """
    num_blocks = -(-x.numel() // BLOCK)
    blocks = torch.zeros(num_blocks * BLOCK, dtype=torch.float32, device=x.device)
    blocks[: x.numel()] = x
    blocks = blocks.view(num_blocks, BLOCK)
    magnitude = torch.where(blocks.isnan(), torch.inf, blocks.abs())
    scales = magnitude.amax(1) if num_blocks else magnitude.new_zeros(0)
    codes = encode(blocks / torch.where(scales == 0, 1.0, scales)[:, None], is_signed)
    return torch.cat([codes.flatten(), scales.contiguous().view(torch.uint8)])


def unpack(state: torch.Tensor, numel: int, is_signed: bool) -> torch.Tensor:
    """Return the (numel,) fp32 numbers of a state made by `pack`."""
    num_blocks = -(-numel // BLOCK)
    codes, scales = state.split([num_blocks * BLOCK, num_blocks * 4])
    values = decode(codes.view(num_blocks, BLOCK), is_signed)
    # A copy: fp32 may not lie at any byte.
    return (values * scales.clone().view(torch.float32)[:, None]).flatten()[:numel]

"""Low-precision formats in plain torch: the exact reference that kernels are held to.

A format maps numbers to codes of 4 or 8 bits; round to nearest, ties to even, saturating. Codes
of 4 bits are packed two to a byte, the even column in the low half. Scaled forms divide blocks
of a row by a scale so that the block's largest magnitude becomes the format's largest number.

Source: OCP 8-bit Floating Point Specification and OCP Microscaling Formats (e4m3, e5m2, e2m1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Magnitudes of e2m1 by code; bit 3 is the sign.
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        name: "fp8_e4m3", "fp8_e5m2", "int8", "int4" or "fp4_e2m1".
        bits: bits of a code.
        largest: largest finite magnitude that is used.
        to_codes: finite fp32 within ±largest to uint8 codes, one to an element.
        from_codes: uint8 codes to fp32.
    """

    name: str
    bits: int
    largest: float
    to_codes: Callable[[torch.Tensor], torch.Tensor]
    from_codes: Callable[[torch.Tensor], torch.Tensor]


def _float8(name: str, dtype: torch.dtype) -> Format:
    return Format(
        name,
        8,
        torch.finfo(dtype).max,
        lambda x: x.to(dtype).view(torch.uint8),
        lambda codes: codes.view(dtype).float(),
    )


def _integer(name: str, bits: int) -> Format:
    half = 1 << (bits - 1)

    def from_codes(codes: torch.Tensor) -> torch.Tensor:
        value = codes.to(torch.int16)
        return torch.where(value >= half, value - 2 * half, value).float()

    return Format(
        name,
        bits,
        float(half - 1),
        # torch.round takes ties to even
        lambda x: (x.round().to(torch.int16) & (2 * half - 1)).to(torch.uint8),
        from_codes,
    )


def _fp4_codes(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_FP4_MAGNITUDES, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = x.abs()
    code = torch.bucketize(magnitude, middles)
    # On a middle, bucketize takes the lower neighbour; ties go to the even code.
    is_tie = (code < len(middles)) & (magnitude == middles[code.clamp_max(len(middles) - 1)])
    code = code + (is_tie & (code % 2 == 1))
    return (code | (torch.signbit(x).to(code.dtype) << 3)).to(torch.uint8)


def _fp4_values(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_FP4_MAGNITUDES, device=codes.device)
    magnitude = table[(codes & 7).long()]
    return torch.where((codes & 8) != 0, -magnitude, magnitude)


FORMATS = {
    one.name: one
    for one in (
        _float8("fp8_e4m3", torch.float8_e4m3fn),
        _float8("fp8_e5m2", torch.float8_e5m2),
        _integer("int8", 8),
        _integer("int4", 4),
        Format("fp4_e2m1", 4, 6.0, _fp4_codes, _fp4_values),
    )
}


def encode(x: torch.Tensor, name: str) -> torch.Tensor:
    """Encode finite numbers, saturating at the format's largest.

    Args:
        x: (..., N) floating; N even for 4-bit formats.
        name: a key of `FORMATS`.

    Returns:
        uint8 codes (..., N), or (..., N / 2) packed for 4-bit formats.

    Raises:
        ValueError: an unknown format, NaN or infinity, or an odd N for a 4-bit format.

    Example:
        >>> decode(encode(torch.tensor([1.0, 5.0]), "fp4_e2m1"), "fp4_e2m1")
        tensor([1., 4.])
    """
    form = _format(name)
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} encodes finite numbers; the input holds NaN or infinity")
    codes = form.to_codes(x.float().clamp(-form.largest, form.largest))
    if form.bits == 8:
        return codes
    if x.shape[-1] % 2:
        raise ValueError(f"{name} packs two codes to a byte: pad the last dimension to even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Decode uint8 codes to fp32, the inverse of `encode` up to rounding."""
    form = _format(name)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes are uint8; got {codes.dtype}")
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return form.from_codes(codes.contiguous())


def quantize(x: torch.Tensor, name: str, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows in blocks, each with its own fp32 scale.

    Args:
        x: (..., N) floating and finite.
        name: a key of `FORMATS`.
        block: columns that share a scale; a divisor of N, 0 for the whole row.

    Returns:
        Codes as `encode` returns them, and scales (..., N / block). x ≈ code × scale.

    Raises:
        ValueError: `block` does not divide N.
    """
    columns = x.shape[-1]
    block = block or columns
    if columns % block:
        raise ValueError(f"block={block} does not divide the {columns} columns")
    blocks = x.float().unflatten(-1, (columns // block, block))
    scales = blocks.abs().amax(-1) / _format(name).largest
    # A block of zeros keeps the scale 1, so that nothing is divided by zero.
    scales = torch.where(scales == 0, 1.0, scales)
    return encode((blocks / scales[..., None]).flatten(-2), name), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """Return code × scale in fp32, (..., N)."""
    values = decode(codes, name)
    blocks = values.unflatten(-1, (scales.shape[-1], values.shape[-1] // scales.shape[-1]))
    return (blocks * scales[..., None]).flatten(-2)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: allowed are {', '.join(FORMATS)}")
    return FORMATS[name]

import pytest
import torch

from nearlight.core import formats

ALL = list(formats.FORMATS)
# Sorted finite values of each format, from its definition rather than from our code.
INT8 = [float(v) for v in range(-127, 128)]
INT4 = [float(v) for v in range(-7, 8)]
FP4 = sorted({s * m for s in (-1, 1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)})


def minifloat(exponent_bits, mantissa_bits, bias, largest):
    values = set()
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = (
                fraction * 2.0 ** (1 - bias)
                if exponent == 0
                else (1 + fraction) * 2.0 ** (exponent - bias)
            )
            if value <= largest:
                values |= {value, -value}
    return sorted(values)


VALUES = {
    "fp8_e4m3": minifloat(4, 3, 7, 448.0),
    "fp8_e5m2": minifloat(5, 2, 15, 57344.0),
    "int8": INT8,
    "int4": INT4,
    "fp4_e2m1": FP4,
}


@pytest.mark.parametrize("name", ALL)
def test_every_value_of_the_format_round_trips(name):
    values = torch.tensor(VALUES[name] + VALUES[name][:1] * (len(VALUES[name]) % 2))
    assert torch.equal(formats.decode(formats.encode(values, name), name), values)


@pytest.mark.parametrize("name", ALL)
def test_rounding_is_to_the_nearest_and_never_further(name):
    table = torch.tensor(VALUES[name], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, generator=generator) * VALUES[name][-1] / 3
    x = x.clamp(table[0], table[-1])
    nearest = (x.double()[:, None] - table).abs().amin(1)
    got = formats.decode(formats.encode(x, name), name).double()
    assert torch.equal((got - x.double()).abs(), nearest)


@pytest.mark.parametrize(
    ("name", "tie", "even"),
    [("int8", 2.5, 2.0), ("int8", 3.5, 4.0), ("int4", -2.5, -2.0), ("fp4_e2m1", 2.5, 2.0),
     ("fp4_e2m1", 5.0, 4.0), ("fp4_e2m1", 3.5, 4.0), ("fp4_e2m1", -0.25, 0.0),
     ("fp4_e2m1", 0.75, 1.0), ("fp8_e4m3", 17.0, 16.0), ("fp8_e4m3", 19.0, 20.0)],
)  # fmt: skip
def test_ties_go_to_even(name, tie, even):
    assert formats.decode(formats.encode(torch.tensor([tie, 0.0]), name), name)[0] == even


@pytest.mark.parametrize("name", ALL)
def test_large_numbers_saturate(name):
    largest = VALUES[name][-1]
    x = torch.tensor([1e30, -1e30])
    assert formats.decode(formats.encode(x, name), name).tolist() == [largest, -largest]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", [0, 16, 64])
def test_quantize_keeps_each_blocks_largest_and_its_relative_error(name, block):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    x[3] *= 1e4
    x[5] = 0
    codes, scales = formats.quantize(x, name, block)
    assert scales.shape == (8, 64 // (block or 64))
    back = formats.dequantize(codes, scales, name)
    blocks, got = (t.unflatten(-1, (-1, block or 64)) for t in (x, back))
    largest = blocks.abs().amax(-1)
    assert torch.allclose(got.abs().amax(-1), largest, rtol=1e-6)
    # Half a step of the format at its largest magnitude bounds every error of the block.
    table = VALUES[name]
    half_step = (table[-1] - table[-2]) / 2 / table[-1]
    assert bool(((got - blocks).abs().amax(-1) <= largest * half_step * (1 + 1e-5)).all())
    assert torch.equal(back[5], x[5])


def test_four_bit_codes_are_packed_low_half_first():
    codes = formats.encode(torch.tensor([1.0, -2.0]), "int4")
    assert codes.tolist() == [0x1 | (0xE << 4)]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="allowed are fp8_e4m3"):
        formats.encode(torch.ones(2), "nf4")
    with pytest.raises(ValueError, match="NaN"):
        formats.encode(torch.tensor([float("nan")]), "int8")
    with pytest.raises(ValueError, match="even"):
        formats.encode(torch.ones(3), "int4")
    with pytest.raises(ValueError, match="block=5"):
        formats.quantize(torch.ones(12), "int8", 5)
    with pytest.raises(TypeError, match="uint8"):
        formats.decode(torch.ones(2), "int8")

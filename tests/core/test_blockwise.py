"""The eight-bit format of optimizer states: exact codes, nearest codes, any size."""

import pytest
import torch

from nearlight.core.blockwise import decode, encode, pack, state_bytes, unpack


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_eight_bit_map_is_exact_and_rounds_to_the_nearest(is_signed):
    codes = torch.arange(256).to(torch.uint8)
    values = decode(codes, is_signed)
    assert torch.equal(encode(values, is_signed), codes)
    assert values.max() == 1 and values.abs()[values != 0].min() == 8.0 ** (-6 if is_signed else -7)
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) ** 6
    x = x * torch.where(torch.arange(4096) % 2 == 0, -1, 1) if is_signed else x
    nearest = (x[:, None].double() - values.double()).abs().amin(1)
    given = (x.double() - decode(encode(x, is_signed), is_signed).double()).abs()
    is_held = x.abs() > 8.0**-7  # below, a second moment is not rounded to 0
    torch.testing.assert_close(given[is_held], nearest[is_held], rtol=1e-5, atol=1e-9)
    assert is_signed or bool((decode(encode(x, False), False)[x > 0] > 0).all())


def test_states_pack_any_size():
    for numel in (0, 1, 255, 256, 257):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        state = pack(x, True)
        assert state.shape == (state_bytes(numel),)
        assert (
            (unpack(state, numel, True) - x).abs().amax(0, keepdim=True).sum() < 0.03
            if numel
            else 1
        )

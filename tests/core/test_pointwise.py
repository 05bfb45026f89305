import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.pointwise import Config, candidates, config, merge_dims, tunable_config
from nearlight.ops._activations import Gated, Unary

H200 = find_gpu("h200")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_merge_follows_the_first_tensor():
    assert merge_dims((2, 3, 4), (1, 2, 6), (1, 2, 6)) == [(24, 1, 1)]
    assert merge_dims((2, 1, 4), (4, 99, 1), (0, 7, 1)) == [(2, 4, 0), (4, 1, 1)]
    assert merge_dims((1, 1), (1, 1)) == []


def test_chunks_of_one_projection_merge_all_but_their_columns():
    gate, up = random(3, 5, 16).chunk(2, dim=-1)
    assert merge_dims(gate.shape, (40, 8, 1), gate.stride(), up.stride()) == [
        (15, 8, 16, 16),
        (8, 1, 1, 1),
    ]


def test_config():
    # One long row of contiguous data: 128 threads take two vectors of 16 bytes.
    assert config((1, 16384 * 14336), torch.bfloat16, H200) == Config(1, 2048, 4)
    assert config((1, 16384 * 14336), torch.float32, H200) == Config(1, 1024, 4)
    assert config((16384, 100), torch.bfloat16, H200) == Config(16, 128, 4)
    # The interpreter takes 32 tokens of SmolLM2 in one program.
    assert config((1, 32 * 1536), torch.float32, None).block_n >= 32 * 1536
    assert config((70_000, 3), torch.float32, None) == Config(65536, 4, 4)


def test_each_op_has_its_own_rows():
    first, second = tunable_config("first"), tunable_config("second")
    assert first is not second
    assert first((3, 5), torch.float32, H200) == config((3, 5), torch.float32, H200)
    assert candidates((3, 5), torch.float32, None) == {}
    assert config((1, 1 << 20), torch.bfloat16, H200) in candidates(
        (1, 1 << 20), torch.bfloat16, H200
    )


@pytest.mark.parametrize("tile", [Config(1, 16, 4), Config(4, 8, 4), Config(2, 64, 4)])
@pytest.mark.parametrize("width", [7, 8, 9, 63, 65])
def test_tile_edges(tile, width):
    double = Unary("double", "relu2", lambda *_: tile)
    gated = Gated("double", "relu2", lambda *_: tile)
    # One row, rows and columns, and two dimensions of rows that do not merge.
    for x, up in (
        (random(3, width), random(3, width, seed=1)),
        (random(3, 2 * width)[:, :width], random(3, width, seed=1)),
        (random(3, 3, width)[:, 1:], random(2, 3, width, seed=1).transpose(0, 1)),
    ):
        value, slope = x.relu() ** 2, 2 * x.relu()
        torch.testing.assert_close(double.forward(x), value, rtol=0, atol=0)
        torch.testing.assert_close(double.backward(up, x), up * slope, rtol=0, atol=0)
        torch.testing.assert_close(gated.forward(x, up), value * up, rtol=0, atol=0)
        dgate, dup = gated.backward(up, x, up)
        torch.testing.assert_close(dgate, up * up * slope, rtol=1e-15, atol=0)
        torch.testing.assert_close(dup, up * value, rtol=1e-15, atol=0)


def test_more_than_three_dimensions_are_copied_and_the_inputs_stay():
    # Four orders of memory: no two dimensions merge.
    x, dout = random(5, 4, 3, 2).permute(3, 2, 1, 0), random(3, 2, 5, 4).permute(1, 0, 3, 2)
    before = x.clone(), dout.clone()
    relu2 = Unary("relu2", "relu2", config)
    torch.testing.assert_close(relu2.backward(dout, x), 2 * x.relu() * dout, rtol=1e-15, atol=0)
    assert torch.equal(x, before[0]) and torch.equal(dout, before[1])

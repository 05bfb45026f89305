import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.row_config import MAX_BLOCK, forward_candidates
from nearlight.ops._softmax_config import HELD_ELEMENTS, candidates, config

H200 = find_gpu("h200")


def test_programs_get_more_warps_where_they_read_more():
    def num_warps(width, direction, dtype=torch.bfloat16):
        return config((4096, width), dtype, H200, direction).num_warps

    assert [num_warps(width, "forward") for width in (32_768, 131_072, 262_144)] == [8, 16, 32]
    assert [num_warps(width, "backward") for width in (32_768, 131_072)] == [8, 32]
    assert num_warps(65_536, "forward", torch.float32) == 16


@pytest.mark.parametrize("direction", HELD_ELEMENTS)
def test_a_row_that_is_held_has_fewer_elements_per_thread_where_more_is_read(direction):
    chosen = config((4096, MAX_BLOCK), torch.bfloat16, H200, direction)
    assert chosen.block_n == MAX_BLOCK
    elements = chosen.block_n // (32 * chosen.num_warps)
    assert elements == max(HELD_ELEMENTS[direction], MAX_BLOCK // 1024)  # 32 warps at most
    assert config((9, MAX_BLOCK + 1), torch.float32, None, direction).block_n == MAX_BLOCK


@pytest.mark.parametrize("direction", HELD_ELEMENTS)
def test_candidates_walk_as_the_rule_does(direction):
    shape = 4096, 131_072
    wide = candidates(shape, torch.bfloat16, H200, direction)
    assert config(shape, torch.bfloat16, H200, direction) in wide
    assert all(each.block_n < shape[1] and each.num_programs == 4096 for each in wide)
    held = candidates((4096, 4096), torch.bfloat16, H200, direction)
    assert held == forward_candidates((4096, 4096), H200)
    assert candidates(shape, torch.bfloat16, None, direction) == {}

from math import isqrt

import pytest
import torch

from nearlight.core.hardware import find_gpu
from nearlight.core.row_config import (
    MAX_BLOCK,
    backward_candidates,
    backward_config,
    forward_candidates,
    forward_config,
    tunable_config,
)
from nearlight.core.tuned import recorded


def test_forward_tile_leaves_no_sm_idle():
    gpu = find_gpu("h200")
    assert forward_config((16384, 128), gpu).block_m == 32
    assert forward_config((gpu.num_sms, 128), gpu).block_m == 1


def test_stages_follow_from_shared_memory():
    large, small = find_gpu("h200"), find_gpu("rtx-4090")
    stages = [
        backward_config((16384, 8192), torch.float32, gpu).num_stages for gpu in (large, small)
    ]
    assert stages == [3, 2]


@pytest.mark.parametrize(
    ("dtype", "num_sums", "widest"),
    [(torch.bfloat16, 1, 8192), (torch.bfloat16, 2, 8192), (torch.float32, 2, 4096)],
)
def test_a_second_upstream_gradient_leaves_registers_for_less_of_a_row(dtype, num_sums, widest):
    def chosen(width):
        return backward_config((16384, width), dtype, find_gpu("h200"), num_sums, num_upstream=2)

    assert chosen(widest).block_n == widest and chosen(widest + 1).block_n < widest
    held, last = chosen(widest // 2), chosen(widest)
    assert last.block_n // last.num_warps == held.block_n // held.num_warps // 2


@pytest.mark.parametrize("gpu", [find_gpu("h200"), find_gpu("l4")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (2**19, 128), (16384, 8192), (4096, 16384), (9, 65536)])
def test_candidates_are_few_and_hold_what_the_rule_holds(shape, dtype, gpu):
    forward, backward = forward_candidates(shape, gpu), backward_candidates(shape, dtype, gpu)
    for found, rule in (
        (forward, forward_config(shape, gpu)),
        (backward, backward_config(shape, dtype, gpu)),
    ):
        assert len([each for each, reason in found.items() if not reason]) <= 64
        assert {each.block_n >= shape[1] for each in found} <= {rule.block_n >= shape[1]}
    for each, reason in backward.items():
        tiles = -(-shape[0] // each.block_m)
        assert 1 <= each.num_programs <= tiles
        # Sums in fp32 keep as many programs as their error needs, whatever is tried.
        assert dtype.itemsize == 2 or each.num_programs >= min(tiles, isqrt(32 * tiles))
        needs_bytes = (each.num_stages - 1) * each.block_m * each.block_n * dtype.itemsize * 2
        assert reason or needs_bytes < gpu.shared_bytes_per_block
    assert backward_candidates(shape, dtype, None) == forward_candidates(shape, None) == {}


def test_a_launch_without_room_says_why():
    found = backward_candidates((4096, 16384), torch.float32, find_gpu("l4"))
    one_row = {each.num_stages: reason for each, reason in found.items() if each.block_m == 1}
    assert one_row == {  # x, dy and the weight of a row in each stage but the first
        1: "",
        2: "200704 bytes of shared memory, a block has 101376",
        3: "397312 bytes of shared memory, a block has 101376",
    }


def test_a_tunable_rule_is_that_of_what_an_op_reads_and_sums():
    gpu, dtype = find_gpu("h200"), torch.bfloat16
    plain = tunable_config("plain")
    assert plain is not tunable_config("plain")  # each has its own tuned rows
    both = tunable_config("both", num_sums=2, num_upstream=2, elements_per_thread=64)
    for width in (128, 4096, MAX_BLOCK // 2, MAX_BLOCK, MAX_BLOCK + 1):
        shape = 16384, width
        assert plain(shape, dtype, gpu) == forward_config(shape, gpu)
        assert plain(shape, dtype, gpu, "backward") == backward_config(shape, dtype, gpu)
        assert both(shape, dtype, gpu, "backward") == backward_config(shape, dtype, gpu, 2, 2)
        elements = 64 if width <= MAX_BLOCK // 2 else 32
        assert both(shape, dtype, gpu) == forward_config(shape, gpu, elements, MAX_BLOCK // 4)
    assert both(shape, dtype, None) == forward_config(shape, None)


def test_candidates_of_a_tunable_rule_are_those_of_its_sums():
    found = tunable_config("both", num_sums=2, num_upstream=2)
    shape, dtype, gpu = (4096, 8192), torch.bfloat16, find_gpu("h200")
    with recorded() as asked:
        found(shape, dtype, gpu)
        found(shape, dtype, gpu, "backward")
    forward, backward = (each.choice.candidates(**each.arguments) for each in asked)
    assert forward == forward_candidates(shape, gpu)
    assert backward == backward_candidates(shape, dtype, gpu, 2, 2)
    assert backward != backward_candidates(shape, dtype, gpu)

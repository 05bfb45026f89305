from math import isqrt

import pytest
import torch

from nearlight.core import rows
from nearlight.core.hardware import find_gpu
from nearlight.core.rows import (
    as_rows,
    backward_candidates,
    backward_config,
    check_rows,
    column_sums,
    forward_candidates,
    forward_config,
    refuse_dtensor,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_column_sums_of_two_partials_in_their_own_dtypes(dtype):
    partials = torch.randn(2, 70, 300, dtype=dtype)
    first, second = torch.empty(300, dtype=torch.bfloat16), torch.empty(300, dtype=dtype)
    column_sums(partials, first, second)
    torch.testing.assert_close(first, partials[0].sum(0).bfloat16())
    torch.testing.assert_close(second, partials[1].sum(0))


def test_column_sums_writes_nothing_else():
    guarded = torch.full((40,), torch.nan)
    column_sums(torch.ones(1, 5, 33), guarded[3:36])
    assert guarded[3:36].eq(5).all()
    assert guarded[:3].isnan().all() and guarded[36:].isnan().all()


def test_as_rows_is_a_view_where_strides_allow():
    x = torch.randn(2, 3, 8)
    for tensor in (x, x[..., 2:6], x[:1, 1:], x.expand(4, 2, 3, 8)[:, 0]):
        assert torch.equal(as_rows(tensor), tensor.reshape(-1, tensor.shape[-1]))
    assert as_rows(x[..., 2:6]).data_ptr() == x[..., 2:6].data_ptr()
    assert as_rows(x.transpose(0, 2)).stride(-1) == 1
    assert as_rows(torch.randn(5)).shape == (1, 5)


def test_forward_tile_leaves_no_sm_idle():
    gpu = find_gpu("h200")
    assert rows.forward_config((16384, 128), gpu).block_m == 32
    assert rows.forward_config((gpu.num_sms, 128), gpu).block_m == 1


def test_stages_follow_from_shared_memory():
    large, small = find_gpu("h200"), find_gpu("rtx-4090")
    stages = [
        rows.backward_config((16384, 8192), torch.float32, gpu).num_stages for gpu in (large, small)
    ]
    assert stages == [3, 2]


def test_refusals_name_the_op():
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    with pytest.raises(TypeError, match="my_op: got a DTensor"):
        refuse_dtensor("my_op", None, torch.ones(2).as_subclass(Sharded))
    with pytest.raises(ValueError, match="my_op: weight has shape"):
        check_rows("my_op", torch.ones(2, 3), weight=torch.ones(2))


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

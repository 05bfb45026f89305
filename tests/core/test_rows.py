import pytest
import torch

from nearlight.core.rows import (
    as_rows,
    check_rows,
    column_sums,
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


def test_refusals_name_the_op():
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    with pytest.raises(TypeError, match="my_op: got a DTensor"):
        refuse_dtensor("my_op", None, torch.ones(2).as_subclass(Sharded))
    with pytest.raises(ValueError, match="my_op: weight has shape"):
        check_rows("my_op", torch.ones(2, 3), weight=torch.ones(2))

"""Kept shapes are Triton's own: same sizes, names and checks, made once."""

import pytest
import triton.language as tl

from nearlight.core.interpreter.patches import patched


@pytest.mark.parametrize(
    "shape",
    [[4], [4, 8], tl.tuple([2, 2, 2]), [tl.constexpr(4), 8]],
    ids=["1d", "2d", "tuple", "constexpr"],
)
def test_types_and_tensors_equal_tritons(shape):
    own = tl.block_type(tl.float32, shape)
    own_tensor = tl.tensor("handle", own)
    with patched():
        kept = tl.block_type(tl.float32, shape)
        kept_tensor = tl.tensor("handle", kept)
        again = tl.block_type(tl.int32, [int(size) for size in kept.shape.values])
    assert kept == own and kept.name == own.name and kept.numel == own.numel
    assert kept.shape is again.shape
    sizes = [size.value for size in kept_tensor.shape.values]
    assert sizes == [size.value for size in own_tensor.shape.values]
    assert kept_tensor.numel.value == own_tensor.numel.value
    assert kept_tensor.dtype == own_tensor.dtype and kept_tensor.handle == "handle"


def test_scalars_have_no_shape():
    with patched():
        scalar = tl.tensor("handle", tl.int64)
    assert scalar.shape.values == [] and scalar.numel.value == 1


@pytest.mark.parametrize(("shape", "error"), [([3], ValueError), ([], TypeError)])
def test_shapes_triton_refuses_are_refused_every_time(shape, error):
    with patched():
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(tl.float32, shape)

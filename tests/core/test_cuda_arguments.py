from pathlib import Path

import numpy as np
import pytest
import torch

from nearlight.core import cuda_arguments
from nearlight.core.cuda import Kernel
from nearlight.core.cuda_arguments import Parameter

ROW_SUM = Path(__file__).parent / "kernels" / "row_sum.cu"


def test_parameters_are_read_from_the_source():
    assert Kernel(ROW_SUM, "row_sum<float>").parameters == (
        Parameter("out", "float", True),
        Parameter("x", "T", True),
        Parameter("num_columns", "long long", False),
        Parameter("scale", "float", False),
    )
    assert [p.type for p in Kernel(ROW_SUM, "fill").parameters] == ["int", "int", "unsigned"]


def test_comments_and_nested_templates_do_not_confuse_the_parameters():
    source = """
    // __global__ void f(int wrong);
    template <int A, int B>
    __global__ __launch_bounds__(128) void f(const Pair<int, float>* pairs, /* count, */ int n) {}
    """
    assert cuda_arguments.parameters(source, "f<1, 2>") == (
        Parameter("pairs", "Pair<int, float>", True),
        Parameter("n", "int", False),
    )


def typed(*args, name="row_sum<float>"):
    parameters = Kernel(ROW_SUM, name).parameters
    return cuda_arguments.typed_arguments("k", parameters, args, torch.device("cpu"))


def test_numbers_take_the_type_of_the_parameter():
    x = torch.ones(4)
    out, _, columns, scale = typed(x, x, 2**40, 2)
    assert out == x.data_ptr()
    assert type(columns) is np.int64 and columns == 2**40
    assert type(scale) is np.float32 and scale == 2.0
    assert typed(torch.ones(4, dtype=torch.int32), -3, 7, name="fill")[1:] == [-3, 7]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.ones(2), torch.ones(2), 1), TypeError, "takes 4 arguments .*got 3"),
        ((torch.ones(2).double(), torch.ones(2), 1, 1.0), TypeError, "out points to float"),
        ((1.0, torch.ones(2), 1, 1.0), TypeError, "out is a pointer"),
        ((torch.ones(2), torch.ones(2), 2**63, 1.0), ValueError, "does not fit long long"),
        ((torch.ones(2), torch.ones(2), 1.5, 1.0), ValueError, "num_columns is long long"),
        ((torch.ones(2, device="meta"), torch.ones(2), 1, 1.0), ValueError, "is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        typed(*args)


def test_an_int_too_large_for_the_parameter_is_refused():
    with pytest.raises(ValueError, match="n=4294967296 does not fit unsigned"):
        typed(torch.ones(1, dtype=torch.int32), 0, 2**32, name="fill")

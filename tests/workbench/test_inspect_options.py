import shlex
from pathlib import Path

import pytest
import triton.language as tl

from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect
from nearlight.workbench.inspect_options import Options
from nearlight.workbench.inspect_target import find

HERE = Path(__file__).parent
CU = HERE / "kernels" / "inspected.cu"
PY = HERE / "inspected.py"


def builds(name, **options):
    return find(name, Options(**options)).builds("sm_90a")


def test_types_come_from_annotations_and_options():
    (build,) = builds(f"{PY}:_copy_kernel")
    assert build.signature == {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    (build,) = builds(f"{PY}:_copy_kernel", types="n=i64:16", constants="BLOCK=64,num_warps=8")
    assert build.signature["n"] == "i64:16" and build.constants == {"BLOCK": 64}
    assert build.num_warps == 8
    (build,) = builds(f"{PY}:_copy_kernel", constants="n=1,BLOCK=64")
    assert "n" not in build.signature and build.constants["n"] == 1
    (build,) = builds(f"{PY}:_tuned_kernel", constants="BLOCK=64")
    assert build.kernel.__name__ == "_tuned_kernel"


def advised(target):
    """Return what the refusal of a target says to add, as a shell reads it."""
    with pytest.raises(BadInput, match="nothing says what .* Correct and give: ") as error:
        builds(target)
    pasted = shlex.split(str(error.value).partition("give: ")[2])
    return {name.strip("-"): text for name, text in zip(pasted[::2], pasted[1::2], strict=True)}


GUESSED = """
import triton
import triton.language as tl
DTYPE = tl.float16

@triton.jit
def twice(x):
    return 2 * x

@triton.jit
def f(x, bias, out, n, eps, x_stride_m, x_stride_n, stride_om, stride_on, stride_bias,
      ACC: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, SIZES: tl.constexpr):
    m, k = tl.arange(0, SIZES)[:, None], tl.arange(0, SIZES)[None, :]
    row = x + m * x_stride_m
    y = tl.zeros((SIZES, SIZES), ACC) + eps
    y += tl.load(row + k * x_stride_n, k < n)
    if HAS_BIAS:
        y += tl.load(bias + k * stride_bias)
    if KIND == "relu":
        y = tl.maximum(y, 0.0)
    else:
        tl.static_assert(False)
    tl.store(out + m * stride_om + k * stride_on, y)

@triton.jit
def general(x_ptr, n, SIZE: tl.constexpr, DO: tl.constexpr, AS: tl.constexpr):
    offsets = tl.arange(0, SIZE[0] * SIZE[1])
    x = tl.load(x_ptr + offsets, offsets < n)
    tl.store(x_ptr + offsets, DO(x).to(AS), offsets < n)
"""


@pytest.fixture
def guessed(tmp_path):
    file = tmp_path / "k.py"
    file.write_text(GUESSED)
    return file


def test_what_is_missing_stands_in_the_message_and_works_when_pasted(guessed):
    assert advised(f"{PY}:_product_kernel") == {
        "types": "a_ptr=*bf16,c_ptr=*bf16",
        "constants": 'PRECISION="ieee",BLOCK=64',
    }
    options = advised(f"{guessed}:f")
    assert options == {
        "types": "x=*bf16,bias=*bf16,out=*bf16,n=i32,eps=fp32,x_stride_m=i32,x_stride_n=1,"
        "stride_om=i32,stride_on=1,stride_bias=i32",
        "constants": 'ACC=fp32,KIND="relu",HAS_BIAS=True,SIZES=64',
    }
    (row,) = inspect(f"{guessed}:f", ["sm_90"], **options).rows
    assert row["registers"] > 0
    (build,) = builds(f"{guessed}:f", **options)
    assert build.constants["ACC"] == tl.float32 and build.constants["x_stride_n"] == 1


def test_what_was_given_stands_in_the_advice_and_none_is_given_that_does_not_compile(guessed):
    with pytest.raises(BadInput) as error:
        builds(f"{guessed}:f", types="n=i64", constants="KIND='relu',num_warps=8")
    assert "--types 'n=i64,x=*bf16" in str(error.value)
    assert "num_warps=8,ACC=fp32" in str(error.value)
    with pytest.raises(BadInput, match="Give --types NAME=.* for x_ptr, n, --constants") as error:
        builds(f"{guessed}:general")
    assert str(error.value).endswith("--constants NAME=VALUE for SIZE, DO, AS")


def test_a_constant_is_what_triton_takes_and_a_number_is_typed_as_a_launch_types_it(guessed):
    constants = "SIZE=(4, 16),DO=twice,AS=DTYPE,enable_fp_fusion=False"
    (build,) = builds(f"{guessed}:general", types="x_ptr=*bf16,n=4096", constants=constants)
    assert build.signature == {"x_ptr": "*bf16", "n": "i32:16"} and not build.enable_fp_fusion
    (row,) = inspect(
        f"{guessed}:general", ["sm_90"], types="x_ptr=*bf16,n=4096", constants=constants
    ).rows
    assert row["registers"] > 0
    for text, kind in (("5", "i32"), (str(2**40), "i64:16"), ("1.5", "fp32"), ("True", "i1")):
        (build,) = builds(f"{PY}:_copy_kernel", types=f"n={text}")
        assert build.signature["n"] == kind
    tensor = "tensordesc<bf16[64, 64]>"
    (build,) = builds(f"{guessed}:general", types=f"n=5,x_ptr={tensor}", constants=constants)
    assert build.signature == {"n": "i32", "x_ptr": tensor}
    for text in ("fp32", "tl.float32", "float32", "torch.float32"):
        (build,) = builds(f"{PY}:_copy_kernel", constants=f"BLOCK={text}")
        assert build.constants["BLOCK"] == tl.float32
    for text, dtype in (("u16", tl.uint16), ("bool", tl.int1), ("i8", tl.int8)):
        (build,) = builds(f"{PY}:_copy_kernel", constants=f"BLOCK={text}")
        assert build.constants["BLOCK"] == dtype


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (f"{PY}:_copy_kernel", {"types": "xptr=*fp32"}, "did you mean x_ptr"),
        (f"{PY}:_copy_kernel", {"types": "n"}, "NAME=VALUE"),
        (f"{PY}:_copy_kernel", {"types": "n=int"}, "n=int: allowed are i1.*did you mean i32"),
        (f"{PY}:_copy_kernel", {"types": "x_ptr=*torch.float16"}, "did you mean fp16"),
        (f"{PY}:_copy_kernel", {"constants": "BLOCK=tl.flot32"}, "allowed are numbers"),
        (f"{PY}:_copy_kernel", {"constants": "num_warps=3"}, "num_warps=3: allowed are 1, 2, 4"),
        (f"{PY}:_copy_kernel", {"constants": "num_warps=True"}, "num_warps=True: allowed are 1"),
        (f"{PY}:_product_kernel", {"constants": "num_stages=-1"}, "num_stages=-1: allowed are"),
    ],
)
def test_bad_input_is_named(name, options, message):
    with pytest.raises(BadInput, match=message):
        builds(name, **options)


def test_options_of_a_mixed_pair_go_where_they_are_meant():
    options = Options(64, 128, "n=i32", "BLOCK=64")
    pair = (f"{CU}:sum", f"{PY}:_copy_kernel")
    assert options.fitting(pair[0], pair) == Options(64, 128)
    assert options.fitting(pair[1], pair) == Options(0, 0, "n=i32", "BLOCK=64")
    assert options.fitting(pair[0], (pair[0], pair[0])) == options

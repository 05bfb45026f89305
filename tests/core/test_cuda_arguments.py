from pathlib import Path

import numpy as np
import pytest
import torch

from nearlight.core import cuda_arguments
from nearlight.core.cuda import Kernel
from nearlight.core.cuda_arguments import Parameter, Template, templates

ROW_SUM = Path(__file__).parent / "kernels" / "row_sum.cu"


def test_parameters_are_read_from_the_source():
    assert Kernel(ROW_SUM, "row_sum<float>").parameters == (
        Parameter("out", "float", True),
        Parameter("x", "float", True),
        Parameter("num_columns", "long long", False),
        Parameter("scale", "float", False),
    )
    assert [p.type for p in Kernel(ROW_SUM, "fill").parameters] == ["int", "int", "unsigned"]


def test_templates_that_nobody_instantiates_are_read_with_their_namespace_and_line():
    source = """
    // template <int N> __global__ void no() {}
    #define KERNEL(n) template <int N> \\
      __global__ void n() {}
    namespace a::b { struct S { int x; };
    template <typename T,
              int N = 4>
    static __global__ void __launch_bounds__(128) f(T* x);
    template <typename T, int N> __global__ void f(T* x) { x[0] = N; }
    }
    namespace { template <class T> __global__ void g(T x) {} }
    template <> __global__ void g<int>(int x) {}
    template <typename T> __device__ T h(T x) { return x; }
    __global__ void plain(int* x) { *x = h(1); }
    template <int N> __global__ void made() {}
    template __global__ void made<3>();
    """
    assert templates(source) == [
        Template("a::b::f", "typename T, int N = 4", 8),
        Template("g", "class T", 11),
    ]


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


@pytest.mark.parametrize(
    ("written", "parameter"),
    [
        ("float** x", Parameter("x", "float*", True)),
        ("float* const* __restrict__ x", Parameter("x", "float*", True)),
        ("float* x[4]", Parameter("x", "float*", True)),
        ("const float x[][4]", Parameter("x", "float", True)),
        ("Pair<int*, float> x", Parameter("x", "Pair<int*, float>", False)),
        ("unsigned long long int x", Parameter("x", "unsigned long long int", False)),
        ("int x = 3", Parameter("x", "int", False)),
        ("T x", Parameter("x", "half*", True)),
        ("[[maybe_unused]] int \\\n x", Parameter("x", "int", False)),
        ("U x", Parameter("x", "U", False)),
        ('T* x, const char* s = "__global__ void f(int x) {}"', Parameter("x", "half**", True)),
    ],
)
def test_declarations_are_read_as_cpp_reads_them(written, parameter):
    source = f"template <typename T, int N, typename U = int>\n__global__ void f({written}) {{}}"
    assert cuda_arguments.parameters(source, "f<half**, 4>")[0] == parameter


def test_template_parameters_are_found_behind_nested_ones():
    source = """template <typename T, template <typename> class Op, typename = enable_if_t<is_x<T>>>
    __global__ void f(T* x, T scale) {}"""
    assert [p.type for p in cuda_arguments.parameters(source, "f<float, Sum>")] == ["float"] * 2


def test_the_line_of_a_kernel_is_found_behind_comments_and_joined_lines():
    source = (
        "/* a\nb */ #define X \\\n 1\n// f(\\\n__global__ f(\n"
        "template <typename T>\n__global__ void\nf(T* x) {}"
    )
    assert cuda_arguments.line_of(source, "f<float>") == 8
    assert cuda_arguments.line_of(source, "g") == 0


def test_a_definition_counts_before_its_declarations():
    source = "__global__ void f(float*, unsigned long);\n" + (
        "#ifdef A\n__global__ void f(float* x, unsigned long n) {}\n"
        "#else\n__global__ void f(float* out, unsigned long size) { }\n#endif"
    )
    assert [p.type for p in cuda_arguments.parameters(source, "f")] == ["float", "unsigned long"]


@pytest.mark.parametrize("branch", ["#ifdef A\n{}\n#else\n{}\n#endif\n", "{}\n{}\n"])
def test_several_definitions_of_one_kernel_are_refused(branch):
    source = branch.format(
        "__global__ void k(float* x, double s) {}", "__global__ void k(float* x, float s) {}"
    )
    with pytest.raises(
        ValueError, match=r"take \(float\* x, double s\) and \(float\* x, float s\); .*own"
    ):
        cuda_arguments.parameters(source, "k")


@pytest.mark.parametrize("written", ["float", "float* x\n#ifdef A\n, int n", "float (*x)[4]"])
def test_a_parameter_that_cannot_be_read_is_refused(written):
    with pytest.raises(ValueError, match="cannot read the kernel parameter"):
        cuda_arguments.parameters(f"__global__ void f({written}) {{}}", "f")


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
        (
            (torch.ones(2), torch.ones(2), 1),
            TypeError,
            r"takes 4 arguments .*got 3 \(a tensor of torch.float32, a tensor of .*, int\)",
        ),
        ((torch.ones(2).double(), torch.ones(2), 1, 1.0), TypeError, "out points to float"),
        ((1.0, torch.ones(2), 1, 1.0), TypeError, "out is a pointer"),
        ((torch.ones(2), torch.ones(2), 2**63, 1.0), ValueError, "does not fit long long"),
        ((torch.ones(2), 7, 1, 1.0), TypeError, r"x is a pointer .*got int; it takes \(float"),
        ((torch.ones(2), torch.ones(2), 1.5, 1.0), TypeError, "num_columns is long long"),
        ((torch.ones(2), torch.ones(2), 2.0, 1.0), TypeError, "takes an integer; got 2.0"),
        ((torch.ones(2), torch.ones(2), torch.ones(2), 1.0), TypeError, "got a tensor of"),
        ((torch.ones(2, device="meta"), torch.ones(2), 1, 1.0), ValueError, "is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        typed(*args)


def test_an_int_too_large_for_the_parameter_is_refused():
    with pytest.raises(ValueError, match="n=4294967296 does not fit unsigned"):
        typed(torch.ones(1, dtype=torch.int32), 0, 2**32, name="fill")


def scalar(written, value):
    parameter = Parameter("s", written, False)
    (typed,) = cuda_arguments.typed_arguments("k", [parameter], [value], torch.device("cpu"))
    return typed


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        ("float", np.float64(0.1), np.float32(0.1)),
        ("double", np.float32(0.1), np.float64(np.float32(0.1))),
        ("float", np.int64(3), np.float32(3)),
        ("float", float("-inf"), np.float32("-inf")),
        ("int", torch.tensor(-2), np.int32(-2)),
        ("int", torch.tensor(9, device="meta"), np.int32(1)),  # whatever it is
        ("long int", np.int32(5), np.int64(5)),
        ("short unsigned int", 65535, np.uint16(65535)),
        ("size_t", np.int8(7), np.uint64(7)),
        ("bool", np.bool_(True), np.bool_(True)),
        ("bool", 0, np.bool_(False)),
        ("T", np.float16(0.5), np.float16(0.5)),  # only the caller knows T
    ],
)
def test_every_number_reaches_the_kernel_in_the_declared_type(written, value, expected):
    typed = scalar(written, value)
    assert type(typed) is type(expected) and typed == expected


@pytest.mark.parametrize(
    ("written", "value", "error", "message"),
    [
        ("int", np.float32(3.0), TypeError, "s is int and takes an integer; got np.float32"),
        ("int", float("nan"), TypeError, "s is int and takes an integer; got nan"),
        ("int", np.int64(2**40), ValueError, "s=1099511627776 does not fit int"),
        ("size_t", np.int32(-1), ValueError, "s=-1 does not fit size_t"),
        ("bool", 2, ValueError, "s=2 does not fit bool"),
        ("float", 1e300, ValueError, "does not fit float"),
        ("double", 10**400, ValueError, "does not fit double"),
        ("int", "3", TypeError, "s is int and takes a number; got '3'"),
        ("float", np.str_("3"), TypeError, "takes a number"),
        ("float", 1j, TypeError, "takes a number"),
        ("int", None, TypeError, "takes a number"),
        ("int", torch.tensor(2.7), TypeError, "s is int"),
        ("int", torch.tensor(2.0, device="meta"), TypeError, "takes an integer"),
        ("float", torch.ones(2), TypeError, "takes a number"),
        ("T", 1.0, TypeError, "exactly its size .*np.float32: 4 bytes.*not float"),
    ],
)
def test_values_that_the_declared_type_cannot_hold_are_refused(written, value, error, message):
    with pytest.raises(error, match=message):
        scalar(written, value)


def test_pointers_to_pointers_take_addresses_and_templates_their_own_dtype():
    addresses = torch.ones(2, dtype=torch.int64)
    declared = cuda_arguments.parameters("__global__ void f(float** x) {}", "f")
    assert cuda_arguments.typed_arguments("f", declared, [addresses], addresses.device) == [
        addresses.data_ptr()
    ]
    with pytest.raises(TypeError, match=r"x points to float\* and takes torch.int64"):
        cuda_arguments.typed_arguments("f", declared, [torch.ones(2)], addresses.device)
    with pytest.raises(TypeError, match="x points to float and takes torch.float32"):
        typed(torch.ones(2), torch.ones(2).bfloat16(), 1, 1.0)

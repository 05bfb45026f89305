import shlex
from pathlib import Path

import pytest
import torch
import triton.language as tl

from nearlight.core import cuda
from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect
from nearlight.workbench.inspect_target import Options, find

HERE = Path(__file__).parent
CU = HERE / "kernels" / "inspected.cu"
PY = HERE / "inspected.py"
PRODUCT = Options(types="a_ptr=*fp16,c_ptr=*fp32", constants="PRECISION='ieee',BLOCK=32")


def builds(name, **options):
    return find(name, Options(**options)).builds("sm_90a")


HIDDEN = """
#define KERNEL(name) __global__ void name##_kernel(float* x) { x[0] = 1; }
KERNEL(made)
namespace outer { namespace inner {
__global__ void deep(int* x) { x[0] = 2; }
template <typename T, int N> __global__ void filled(T* x) { x[0] = N; }
template __global__ void filled<float, 4>(float*);
template <int N, bool B> __global__ void loose(int* x) { x[0] = B ? N : 0; }
} }
namespace { __global__ void unnamed(void (*f)(int), int* x) { x[0] = 3; } }
static __global__ void twice(int* x) { x[0] = 4; }
static __global__ void twice(float* x) { x[0] = 4; }
#if 0
__global__ void off(int* x) { x[0] = 5; }
#endif
extern "C" __global__ void c(int* x) { x[0] = 6; }
"""
FOUND = ["made_kernel", "outer::inner::deep", "outer::inner::filled<float, 4>", "unnamed",
         "twice(int*)", "twice(float*)", "c"]  # fmt: skip


@pytest.fixture
def hidden(tmp_path):
    file = tmp_path / "hidden.cu"
    file.write_text(HIDDEN)
    return file


def test_the_compiler_says_which_kernels_a_file_has(hidden):
    assert [build.kernel.name for build in builds(str(hidden))] == FOUND
    assert [b.kernel.name for b in builds(f"{hidden}:deep")] == FOUND[1:2]
    assert [b.kernel.name for b in builds(f"{hidden}:inner::filled")] == FOUND[2:3]
    assert [b.kernel.name for b in builds(f"{hidden}:twice")] == FOUND[4:6]
    assert [b.kernel.name for b in builds(f"{hidden}:twice(int*)")] == FOUND[4:5]
    (build,) = builds(f"{hidden}:outer::inner::filled<int, 8>")
    assert build.kernel.compile("sm_90a").symbol == "_ZN5outer5inner6filledIiLi8EEEvPT_"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "off",
            "no kernel 'off'; name one as '.*hidden.cu:NAME', .*; the compiler finds: made",
        ),
        ("loose", r"no kernel 'loose'.*, a template as '.*hidden.cu:loose<\.\.\.>'; the"),
        ("loose<4, true>", r"true>' \(identifier .loose. is undefined\).*:loose<\.\.\.>'"),
        ("outer::inner::loose<4>", r"cannot determine which instance.*inner::loose<\.\.\.>'"),
    ],
)
def test_a_name_that_the_compiler_does_not_know_is_answered_by_those_it_does(hidden, name, message):
    with pytest.raises(BadInput, match=message):
        builds(f"{hidden}:{name}")


def test_what_is_private_of_torch_and_nvrtc_still_answers(hidden):
    assert torch._C._demangle("_ZN1a4copyIfEEvPT_") == "void a::copy<float>(float*)"
    with pytest.raises(cuda.CompileError, match="__nv_name_map.*error: identifier .loose. is"):
        cuda.compile_kernel(hidden, "loose<4, true>", "sm_90a")


def test_a_kernel_found_answers_for_its_arch_alone():
    (build,) = builds(f"{CU}:sum")
    with pytest.raises(AssertionError, match="compiled for sm_90a, asked for sm_80"):
        build.kernel.compile("sm_80")


def test_a_file_is_compiled_once_for_all_its_kernels(hidden, monkeypatch, tmp_path):
    compiled = []

    def counted(*arguments):
        compiled.append(arguments[3])
        return original(*arguments)

    original = cuda._compile
    monkeypatch.setattr(cuda, "_compile", counted)
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "cache"))
    report = inspect(str(hidden), ["sm_80", "sm_90"])
    assert compiled == ["sm_80", "sm_90a"] and len(report.rows) == 2 * len(FOUND)


def test_a_cuda_file_gives_its_kernels_but_templates():
    assert [b.kernel.name for b in builds(str(CU))] == ["spills", "local_array", "sum"]
    assert [b.num_threads for b in builds(str(CU), block=128)] == [128] * 3
    (build,) = builds(f"{CU}:copy<float>")
    assert build.kernel.name == "copy<float>" and build.kernel.path == CU


def test_ops_are_found_by_name_and_by_file():
    assert find("swiglu", Options()).op.name == "swiglu"
    target = find(str(HERE / "twins.py") + ":TIGHT", Options())
    assert target.op is not None and len(target.builds("sm_80")) == 1


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


RECORDED = """
import sys; sys.path.insert(0, {here!r})
from dataclasses import replace
from pathlib import Path
import twins, inspected
from nearlight.core.cuda import Kernel
from nearlight.core.op import KernelBuild
copy = inspected._copy_kernel
cu = Kernel(Path({cu!r}), "copy<float>")
def builds(arch):
    if arch == "sm_75":
        raise ValueError("needs sm_80")
    bf16 = {{"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32:16"}}
    fp32 = {{**bf16, "x_ptr": "*fp32"}}
    return [KernelBuild(copy, bf16, {{"BLOCK": 512}}, num_warps=2),
            KernelBuild(copy, fp32, {{"BLOCK": 256}}), KernelBuild(cu, {{}}, {{}}, num_threads=256)]
OP = replace(twins.OP, builds=builds)
AGAIN = replace(twins.OP, builds=builds)
REFUSES = twins.REFUSES_ARCH
"""


def test_a_kernel_is_built_as_the_records_of_its_file_say(tmp_path):
    file = tmp_path / "op.py"
    file.write_text(RECORDED.format(here=str(HERE), cu=str(CU)))
    first, second = builds(f"{file}:copy")
    assert (first.num_warps, first.constants, first.signature["n"]) == (2, {"BLOCK": 512}, "i32:16")
    assert second.signature["x_ptr"] == "*fp32" and first == builds(f"{file}:_copy_kernel")[0]
    first, second = builds(f"{file}:copy", types="n=i64", constants="BLOCK=64,num_warps=8")
    assert first.signature == {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i64"}
    assert first.constants == second.constants == {"BLOCK": 64} and second.num_warps == 8
    (build,) = builds(f"{file}:cu")
    assert build.num_threads == 256 and builds(f"{file}:copy<float>") == [build]
    with pytest.raises(BadInput, match="are for a Triton kernel"):
        builds(f"{file}:cu", constants="BLOCK=64")
    with pytest.raises(BadInput, match="no kernel or Op record called cpy; name one of .*copy"):
        find(f"{file}:cpy", Options()).builds("sm_90a")
    with pytest.raises(ValueError, match="needs sm_80"):
        find(f"{file}:copy", Options()).builds("sm_75")
    assert {build.name for build in builds("swiglu:_gated_fwd_kernel")} == {"_gated_fwd_kernel"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("swglu", {}, "nearest: swiglu"),
        ("nothing.cu", {}, "no file nothing.cu"),
        (f"{CU}:spill", {}, "no kernel 'spill'.*the compiler finds: spills"),
        (f"{CU}:copy", {}, r"no kernel 'copy'.*, a template .*:copy<\.\.\.>"),
        (f"{CU}:spills", {"block": 2048}, "1 to 1024 threads"),
        (f"{CU}:spills", {"types": "x=i32"}, "Triton"),
        ("swiglu", {"block": 32}, "--block and --shared are for a .cu file"),
        (f"{CU}:spills", {"shared": -1}, "not below 0"),
        (str(HERE / "twins.py"), {"constants": "BLOCK=1"}, "is an Op record"),
        (str(PY), {}, "no Op record called OP; name one of _copy_kernel, _product_kernel"),
        (f"{PY}:_cpy_kernel", {}, "name one of _copy_kernel"),
        (f"{PY}:_copy_kernel", {"types": "xptr=*fp32"}, "did you mean x_ptr"),
        (f"{PY}:_copy_kernel", {"types": "n"}, "NAME=VALUE"),
        (f"{PY}:_copy_kernel", {"types": "n=int"}, "n=int: allowed are i1.*did you mean i32"),
        (f"{PY}:_copy_kernel", {"types": "x_ptr=*torch.float16"}, "did you mean fp16"),
        (f"{PY}:_copy_kernel", {"constants": "BLOCK=tl.flot32"}, "allowed are numbers"),
    ],
)
def test_bad_input_is_named(name, options, message):
    with pytest.raises(BadInput, match=message):
        builds(name, **options)


def test_a_file_without_a_kernel_names_none(tmp_path):
    file = tmp_path / "k.cu"
    file.write_text("// nothing yet\n")
    for target in (file, f"{file}:copy"):
        with pytest.raises(
            BadInput, match="k.cu has no kernel: it defines no __global__ function$"
        ):
            builds(str(target))


def test_a_file_of_templates_alone_says_how_to_name_one(tmp_path):
    file = tmp_path / "k.cu"
    file.write_text("template <typename T> __global__ void copy(T* x) {}\n")
    with pytest.raises(BadInput, match=r"no kernel;.* as '.*k.cu:NAME<\.\.\.>'.* finds: none"):
        builds(str(file))


def test_options_of_a_mixed_pair_go_where_they_are_meant():
    options = Options(64, 128, "n=i32", "BLOCK=64")
    pair = (f"{CU}:sum", f"{PY}:_copy_kernel")
    assert options.fitting(pair[0], pair) == Options(64, 128)
    assert options.fitting(pair[1], pair) == Options(0, 0, "n=i32", "BLOCK=64")
    assert options.fitting(pair[0], (pair[0], pair[0])) == options

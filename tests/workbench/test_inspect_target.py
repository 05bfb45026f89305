from pathlib import Path

import pytest
import torch

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


def test_what_is_missing_stands_in_the_message_to_be_pasted():
    with pytest.raises(BadInput, match="a_ptr, c_ptr, PRECISION, BLOCK are") as error:
        find(f"{PY}:_product_kernel", Options())
    assert "--types 'a_ptr=*bf16,c_ptr=*bf16' --constants 'PRECISION=128,BLOCK=128'" in str(
        error.value
    )
    assert len(find(f"{PY}:_product_kernel", PRODUCT).builds("sm_80")) == 1


def test_a_guess_is_a_pointer_where_an_address_begins_with_it(tmp_path):
    file = tmp_path / "k.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef f(x, bias, out, n, x_stride):\n"
        "    offsets = n + tl.arange(0, 16)\n"
        "    row = x + offsets * x_stride\n"
        "    tl.store(out + offsets, tl.load(row + 1) + tl.load(bias))\n"
    )
    with pytest.raises(BadInput, match="Correct") as error:
        find(f"{file}:f", Options())
    assert str(error.value).endswith("'x=*bf16,bias=*bf16,out=*bf16,n=i32,x_stride=i64'")


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

from pathlib import Path

import pytest
import torch

from nearlight.core import cuda
from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect
from nearlight.workbench.inspect_options import Options
from nearlight.workbench.inspect_target import find
from nearlight.workbench.new import new

CU = Path(__file__).parent / "kernels" / "inspected.cu"


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


def refused(name):
    """Return the lines of what is said of a name, without the file's folder."""
    with pytest.raises(BadInput) as error:
        builds(name)
    folder = Path(name.partition(":")[0]).parent
    return str(error.value).replace(f"{folder}/", "").splitlines()


LOOSE = "  outer::inner::loose<int N, bool B> at hidden.cu:8"
NAME_LOOSE = "name one: nearlight inspect 'hidden.cu:outer::inner::loose<4, true>'"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("off", "hidden.cu has no kernel 'off'; it has:"),
        ("loose", "hidden.cu:loose is a template, compiled for arguments that you name:"),
        (
            "loose<4, true>",
            "hidden.cu has no kernel 'loose<4, true>' (identifier \"loose\" is undefined); it has:",
        ),
        (
            "outer::inner::loose<4>",
            "hidden.cu has no kernel 'outer::inner::loose<4>' (cannot determine which instance of "
            'function template "outer::inner::loose" is intended); it has:',
        ),
    ],
)
def test_a_name_that_the_compiler_does_not_know_is_answered_by_those_it_does(hidden, name, said):
    first, *listed, last = refused(f"{hidden}:{name}")
    assert first == said
    if "loose" in name:
        assert (listed, last) == ([LOOSE], NAME_LOOSE)
    else:
        assert listed == [f"  {each}" for each in FOUND] + [LOOSE]
        assert last == "name one: nearlight inspect hidden.cu:made_kernel"


def test_the_kernel_most_like_a_name_comes_first():
    _, first, *_, last = refused(f"{CU}:spill")
    assert first == "  spills" and last == "name one: nearlight inspect inspected.cu:spills"
    assert refused(f"{CU}:copy<float,3>")[1:] == [
        "  copy<typename T> at inspected.cu:3",
        "name one: nearlight inspect 'inspected.cu:copy<float>'",
    ]


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
    assert refused(str(file)) == [
        "k.cu has kernels only as templates, compiled for arguments that you name:",
        "  copy<typename T> at k.cu:1",
        "name one: nearlight inspect 'k.cu:copy<float>'",
    ]
    assert inspect(f"{file}:copy<float>", ["sm_80"]).rows[0]["kernel"] == "copy<float>"
    file.write_text("template <typename T> __global__ void copy(T x) { x.go(); }\n")
    assert refused(str(file))[-1] == "name one: nearlight inspect 'k.cu:copy<...>'"
    file.write_text("#define T(n) template <typename T> __global__ void n(T* x) {}\nT(copy)\n")
    assert "the compiler finds none; name a template with its arguments" in refused(str(file))[0]


def test_the_op_file_that_launches_a_template_is_named(tmp_path):
    new("launched", "cuda", tmp_path)  # a name that no other test takes
    (tmp_path / "a_note.py").write_text("# about launched.cu\n")
    *listed, last = refused(f"{tmp_path / 'launched.cu'}:launched_bwd")
    assert listed[1].startswith("  launched_bwd<typename T, typename Acc> at launched.cu:")
    assert listed[2] == "name one: nearlight inspect 'launched.cu:launched_bwd<float, float>'"
    assert last == "or as launched.py launches it: nearlight inspect launched.py:launched_bwd"
    found = builds(f"{tmp_path / 'launched.py'}:launched_bwd")
    assert {each.name.partition("<")[0] for each in found} == {"launched_bwd"}


def test_a_template_of_a_header_or_a_macro_is_found_by_its_arguments(tmp_path):
    (tmp_path / "k.cuh").write_text(
        "#define MADE(n) template <int N> __global__ void n(int* x) { *x = N; }\n"
        "template <int N> __global__ void set(int* x) { *x = N; }\n"
    )
    (tmp_path / "k.cu").write_text('#include "k.cuh"\nMADE(made)\n')
    for name in ("set<3>", "made<3>"):
        (build,) = builds(f"{tmp_path / 'k.cu'}:{name}")
        assert build.kernel.name == name
    assert refused(f"{tmp_path / 'k.cu'}:set")[1] == "  set<int N> at k.cuh:2"


def test_templates_that_are_not_shown_are_told():
    assert find(str(CU), Options()).left_out == (
        f"templates, to be named with arguments: copy<typename T> at {CU}:3"
    )
    assert "left out: templates" in inspect(str(CU), ["sm_80"]).setup
    assert find(f"{CU}:sum", Options()).left_out == ""

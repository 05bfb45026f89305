from pathlib import Path

import pytest

from nearlight.core import cuda, cuda_messages
from nearlight.core.cuda_messages import errors_in
from nearlight.core.cuda_sources import libcudacxx
from nearlight.core.op import KernelBuild
from nearlight.core.triton import compile_for

HERE = Path(__file__).parent


@pytest.fixture
def said(tmp_path):
    """Return the lines that a compilation of a source is answered with, below the first."""

    def compile_text(text):
        file = tmp_path / "k.cu"
        file.write_text(text)
        with pytest.raises(cuda.CompileError, match="^k.cu does not compile for sm_80:\n") as error:
            cuda.compile_file(file, "sm_80")
        return str(error.value).replace(f"{file}(", "k.cu(").splitlines()[1:]

    return compile_text


def test_every_error_has_the_users_line_and_nothing_stands_around(said):
    lines = said("__global__ void f(int* x) {\n  x[0] = y;\n\n  x[1] = z;\n}\n")
    assert lines == [
        'k.cu(2): error: identifier "y" is undefined', "    x[0] = y;", "           ^",
        'k.cu(4): error: identifier "z" is undefined', "    x[1] = z;", "           ^",
    ]  # fmt: skip
    assert errors_in("\n".join(lines)) == [lines[0], lines[3]]


def test_an_error_of_several_lines_is_whole(said):
    lines = said(
        "template <typename T> __device__ T h(T a, T b) { return a; }\n"
        "__global__ void f(int* x) {\n          x[0] = h(1, 2.f);\n}\n"
    )
    assert errors_in("\n".join(lines)) == [
        'k.cu(3): error: no instance of function template "h" matches the argument list '
        "argument types are: (int, float)"
    ]


def test_ptxas_names_lines_and_functions_of_the_source(said):
    asm = 'asm volatile("wgmma.fence.sync.aligned;");'
    refused = "error: Instruction 'wgmma.fence' not supported on .target 'sm_80'"
    text = f"__device__ void twice() {{\n  {asm}\n}}\n__global__ void f() {{ twice(); twice(); }}\n"
    assert said(text) == [f"k.cu(2): {refused}"]
    assert said(
        "extern __device__ int g(int);\n__global__ void f(int* x) {\n  *x = g(2);\n}\n"
    ) == ["k.cu(3): error: Unresolved extern function 'g(int)'"]
    large = "\n__global__ void f(int* x) {\n  __shared__ int s[20000]; s[*x] = 1; *x = s[1];\n}\n"
    (line,) = said(large)
    assert line.startswith("k.cu(") and line.endswith(
        "): error: Entry function 'f(int*)' uses too much shared data (80000 bytes, 49152 max)"
    )


def test_ptxas_names_lines_of_a_triton_kernel(tmp_path):
    kernel = load(tmp_path)
    with pytest.raises(Exception, match=r"k.py\(6\): error: Unknown modifier '.bar'") as error:
        compile_for(KernelBuild(kernel, {"x_ptr": "*fp32"}, {}), "sm_80")
    assert "Repro" not in str(error.value)


def load(folder):
    from nearlight.workbench.load import load_file

    (folder / "k.py").write_text(
        "import triton\nimport triton.language as tl\n@triton.jit\ndef f(x_ptr):\n"
        "    x = tl.load(x_ptr + tl.arange(0, 128))\n"
        "    x = tl.inline_asm_elementwise('foo.bar $0, $1;', '=f,f', [x], tl.float32, True, 1)\n"
        "    tl.store(x_ptr + tl.arange(0, 128), x)\n"
    )
    return load_file(folder / "k.py").f


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("cstdio", "leave cstdio out; printf"),
        ("math.h", "leave math.h out; printf"),
        ("vector", "a kernel no <vector>: pass pointers and sizes"),
        ("mine.cuh", "headers are looked for beside the .cu file"),
        ("torch/extension.h", "headers are looked for beside the .cu file"),
        ("limits", "write #include <cuda/std/limits>, whose names are in cuda::std"),
        ("stdint.h", "write #include <cuda/std/cstdint>"),
    ],
)
def test_a_header_of_the_hosts_is_answered_by_what_device_code_has(said, header, hint):
    lines = said(f"#include <{header}>\n__global__ void f(int* x) {{ *x = 1; }}\n")
    assert lines[0] == f'k.cu(1): catastrophic error: cannot open source file "{header}"'
    assert hint in lines[-1]


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("missing.h", "headers are looked for beside the .cu file"),
        ("helper", "headers are looked for beside the .cu file"),
        ("math.h", "leave math.h out; printf"),
        ("stdint.h", "write #include <cuda/std/cstdint>"),
    ],
)
def test_a_header_in_quotes_is_the_users_unless_the_host_has_one_of_its_name(said, header, hint):
    assert hint in said(f'#include "{header}"\n__global__ void f(int* x) {{ *x = 1; }}\n')[-1]


def test_an_integer_of_a_header_of_the_hosts_is_answered_by_that_of_cuda_std(said):
    text = "__global__ void f(uint32_t* x) { *x = 1; }\n"
    assert "write #include <cuda/std/cstdint>" in said(text)[-1]


def test_what_is_not_installed_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(cuda_messages, "libcudacxx", lambda: None)
    for name in ("limits", "stdint.h", "cub/cub.cuh", "nv/target"):
        text = f'k.cu(1): catastrophic error: cannot open source file "{name}"'
        hint = cuda_messages.at_source_lines(text, Path("k.cu"), "").splitlines()[-1]
        assert " comes with pip install " in hint and "[cuda]" in hint


@pytest.mark.skipif(libcudacxx() is None, reason="libcu++ is an extra")
def test_cooperative_groups_and_cuda_std_compile(tmp_path):
    file = tmp_path / "k.cu"
    file.write_text(
        "#include <cooperative_groups.h>\n#include <cuda/std/limits>\n"
        "__global__ void f(float* x) {\n  cooperative_groups::this_thread_block().sync();\n"
        "  *x = cuda::std::numeric_limits<float>::infinity();\n}\n"
    )
    assert cuda.compile_file(file, "sm_80").code

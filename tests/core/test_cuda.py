import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nearlight.core import cuda
from nearlight.core.cuda import CompileError, Kernel, Parameter

ROW_SUM = Path(__file__).parent / "kernels" / "row_sum.cu"
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["row_sum<float>", "row_sum<__nv_bfloat16>", "fill"])
def test_compiles_for_every_arch_without_a_gpu(cache, arch, name):
    cubin = Kernel(ROW_SUM, name).compile(arch)
    assert cubin.code[:4] == b"\x7fELF"
    assert name.split("<")[0] in cubin.symbol
    assert "0 bytes spill stores" in cubin.log


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
    assert cuda.parameters(source, "f<1, 2>") == (
        Parameter("pairs", "Pair<int, float>", True),
        Parameter("n", "int", False),
    )


def test_an_unknown_kernel_names_those_that_exist():
    with pytest.raises(ValueError, match="no kernel 'rowsum'.*fill, row_sum"):
        Kernel(ROW_SUM, "rowsum").compile("sm_80")


def test_an_unknown_arch_is_refused():
    with pytest.raises(ValueError, match="sm_90a"):
        Kernel(ROW_SUM, "fill").compile("hopper")


def test_compiler_errors_carry_the_users_own_lines(cache, tmp_path):
    file = tmp_path / "bad.cu"
    file.write_text("__global__ void f(int* x) {\n  x[0] = y;\n}\n")
    with pytest.raises(CompileError, match=r'bad.cu\(2\): error: identifier "y" is undefined'):
        Kernel(file, "f").compile("sm_80")


def test_the_second_compile_comes_from_the_cache_and_an_edit_does_not(cache, tmp_path, monkeypatch):
    (tmp_path / "value.cuh").write_text("#define VALUE 1\n")
    file = tmp_path / "k.cu"
    file.write_text('#include "value.cuh"\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n')
    first = Kernel(file, "f").compile("sm_90a")
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_compile", lambda *a: pytest.fail("compiled again"))
        assert Kernel(file, "f").compile("sm_90a") == first
    (tmp_path / "value.cuh").write_text("#define VALUE 2\n")
    assert Kernel(file, "f").compile("sm_90a").code != first.code
    other = Kernel(file, "f", options=(("fma", False),)).compile("sm_90a")
    assert len(list(cache.iterdir())) == 3
    assert other.arch == "sm_90a"


def test_many_processes_compile_the_same_kernel_at_once(cache):
    script = (
        "from pathlib import Path; from nearlight.core.cuda import Kernel;"
        f"print(len(Kernel(Path({str(ROW_SUM)!r}), 'fill').compile('sm_80').code))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    sizes = {process.communicate()[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(sizes) == 1
    # One whole entry, and nothing written aside is left over.
    assert [p.suffix for p in cache.iterdir()] == [".cubin"]


def typed(*args, name="row_sum<float>"):
    parameters = Kernel(ROW_SUM, name).parameters
    return cuda.typed_arguments("k", parameters, args, torch.device("cpu"))


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


def test_cpu_tensors_without_an_emulator_say_so():
    if cuda.importlib.util.find_spec("nearlight.emulator"):
        pytest.skip("the emulator exists and has tests of its own")
    with pytest.raises(RuntimeError, match="needs the emulator"):
        Kernel(ROW_SUM, "fill")[(1,), (32,)](torch.zeros(4, dtype=torch.int32), 1, 4)


def test_a_launch_without_tensors_is_refused():
    with pytest.raises(TypeError, match="at least one tensor"):
        Kernel(ROW_SUM, "fill")[(1,), (32,)](None, 1, 4)

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearlight.core import cuda
from nearlight.core.cuda import CompileError, Kernel

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


def test_cpu_tensors_without_an_emulator_say_so():
    if cuda.importlib.util.find_spec("nearlight.emulator"):
        pytest.skip("the emulator exists and has tests of its own")
    with pytest.raises(RuntimeError, match="needs the emulator"):
        Kernel(ROW_SUM, "fill")[(1,), (32,)](torch.zeros(4, dtype=torch.int32), 1, 4)


def test_a_launch_without_tensors_is_refused():
    with pytest.raises(TypeError, match="at least one tensor"):
        Kernel(ROW_SUM, "fill")[(1,), (32,)](None, 1, 4)

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from nearlight.core import compile_cache, cuda
from nearlight.core.cuda import CompileError, Kernel
from nearlight.core.cuda_sources import libcudacxx

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


def test_a_file_compiles_whole_and_no_kernel_is_one_without_a_name(cache):
    for _ in range(2):  # compiled, and from the cache
        cubin = cuda.compile_file(ROW_SUM, "sm_90a")
        assert (cubin.symbol, cubin.parameters) == ("", ()) and ".entry fill(" in cubin.ptx
    with pytest.raises(CompileError, match="expected an expression"):
        cuda.compile_kernel(ROW_SUM, "", "sm_90a")


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
    (entry,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_compile", lambda *a: pytest.fail("compiled again"))
        assert Kernel(file, "f").compile("sm_90a") == first
    (tmp_path / "value.cuh").write_text("#define VALUE 2\n")
    assert Kernel(file, "f").compile("sm_90a").code != first.code
    other = Kernel(file, "f", options=(("fma", False),)).compile("sm_90a")
    assert len(list(cache.iterdir())) == 3
    assert other.arch == "sm_90a"
    (tmp_path / "value.cuh").write_text("#define VALUE 1\n")
    for damaged in (b"", b"k\0log\0", entry.read_bytes()[:-1]):
        entry.write_bytes(damaged)
        assert Kernel(file, "f").compile("sm_90a").code == first.code
        assert compile_cache.load(entry) is not None


def test_another_version_of_a_package_with_headers_compiles_anew(cache, tmp_path, monkeypatch):
    file = tmp_path / "k.cu"
    file.write_text('#include <cuda_fp16.h>\nextern "C" __global__ void f(int* x) { *x = 1; }\n')
    for number in ("1", "1", "2"):
        monkeypatch.setattr(cuda, "package_versions", lambda number=number: {"triton": number})
        Kernel(file, "f").compile("sm_90a")
    assert len(list(cache.iterdir())) == 2


@pytest.mark.skipif(libcudacxx() is None, reason="CUB comes with an extra")
def test_a_kernel_with_cub_comes_from_the_cache(cache, tmp_path, monkeypatch):
    file = tmp_path / "k.cu"
    file.write_text("#include <cub/warp/warp_reduce.cuh>\n__global__ void f(int* x) { *x = 1; }\n")
    first = cuda.compile_file(file, "sm_90a")
    monkeypatch.setattr(cuda, "_compile", lambda *a: pytest.fail("compiled again"))
    assert cuda.compile_file(file, "sm_90a") == first


def compiled_name(file, **options):
    """Compile a kernel whose name ends in the V of the header that the compiler found."""
    text = Kernel(file, "f", **options).compile("sm_80").code
    return [n for n in range(1, 10) if f"chosen_{n}".encode() in text]


CHOSEN = """
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
extern "C" __global__ void JOIN(chosen_, V)() {}
__global__ void f(int* x) {}
"""


@pytest.mark.parametrize("include", ["#include <v.h>", '#include "v.h"', '#include "a/a.h"'])
def test_an_edit_of_any_header_compiles_anew(cache, tmp_path, include):
    header = tmp_path / ("a/v.h" if "a.h" in include else "v.h")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "a.h").write_text('#include "v.h"\n')
    (tmp_path / "b" / "b.h").write_text('#include "v.h"\n')
    (tmp_path / "b" / "v.h").write_text("")
    file = tmp_path / "k.cu"
    file.write_text(f'#include "b/b.h"\n{include}\n{CHOSEN}')
    for version in (1, 2):
        header.write_text(f"#define V {version}\n")
        assert compiled_name(file) == [version]


def test_a_header_named_by_a_macro_is_compiled_each_time(cache, tmp_path):
    file = tmp_path / "k.cu"
    file.write_text(f"#include HEADER\n{CHOSEN}")
    for version in (1, 2):
        (tmp_path / "v.h").write_text(f"#define V {version}\n")
        assert compiled_name(file, defines=(("HEADER", "<v.h>"),)) == [version]


def test_headers_come_from_beside_the_file_and_never_from_the_working_directory(
    cache, tmp_path, monkeypatch
):
    for folder, version in (("source", 1), ("elsewhere", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "v.h").write_text(f"#define V {version}\n")
    (tmp_path / "source" / "k.cu").write_text(f'#include "v.h"\n{CHOSEN}')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compiled_name(Path("../source/k.cu")) == [1]


def test_a_cache_that_cannot_be_written_does_not_stop_a_compilation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file" / "cache"))
    compile_cache._warn.cache_clear()
    with pytest.warns(UserWarning, match="compiled kernels are not kept"):
        assert Kernel(ROW_SUM, "fill").compile("sm_80").code[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("std", r"`std` is not for the caller: it is always 'c\+\+17'"),
        ("include_path", "headers lie beside the .cu file"),
        ("define_macro", "use defines"),
        ("pre_include", "include the header in the .cu file"),
        ("use_fast_maths", "there is no `use_fast_maths`; did you mean `use_fast_math`"),
    ],
)
def test_options_that_are_not_the_callers_are_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        Kernel(ROW_SUM, "fill", options=((name, "x"),)).compile("sm_80")
    assert not isinstance(caught.value, CompileError)


def test_a_new_kernel_takes_the_parameters_of_the_edited_file(tmp_path):
    file = tmp_path / "k.cu"
    x = torch.zeros(4)
    file.write_text("__global__ void f(float* x, int n) {}")
    with pytest.raises(TypeError, match=r"takes 2 arguments \(float\* x, int n\)"):
        Kernel(file, "f")[(0,), (32,)](x)
    file.write_text("__global__ void f(float* x) {}")
    Kernel(file, "f")[(0,), (32,)](x)


def test_a_loaded_kernel_keeps_the_parameters_it_was_compiled_with(cache, tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(cuda, "_context", lambda index: _FakeContext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr("cuda.core.ObjectCode", _FakeObjectCode)
    monkeypatch.setattr("cuda.core.launch", lambda *args: launched.append(args[2:]))
    monkeypatch.setattr("cuda.core.LaunchConfig", dict)
    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void f(float* x, float s) { *x = s; }')
    kernel = Kernel(file, "f")
    x = torch.empty(4, device="meta")
    kernel[(1,), (32,)]._launch(x.device, (x, np.float64(0.5)))
    file.write_text('extern "C" __global__ void f(float* x, double s) { *x = s; }')
    kernel[(1,), (32,)]._launch(x.device, (x, 0.5))
    Kernel(file, "f")[(1,), (32,)]._launch(x.device, (x, np.float32(0.5)))
    assert [(symbol, type(s)) for symbol, _, s in launched] == [
        ("f", np.float32),
        ("f", np.float32),
        ("f", np.float64),
    ]


def test_every_thread_binds_its_own_context_once(monkeypatch):
    """A thread of autograd's has no context until somebody binds one."""
    bound = []

    class Device:
        def __init__(self, index):
            self.index = index

        def set_current(self):
            bound.append((threading.current_thread().name, self.index))

    monkeypatch.setattr("cuda.core.Device", Device)

    def launch_twice():
        assert cuda._context(7) is cuda._context(7)
        cuda._context(8)

    for name in ("a", "b"):
        thread = threading.Thread(target=launch_twice, name=name)
        thread.start()
        thread.join()
    assert bound == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


class _FakeContext:
    compute_capability = (8, 0)

    def create_stream(self, stream):
        return stream


class _FakeObjectCode:
    @classmethod
    def from_cubin(cls, code):
        assert code[:4] == b"\x7fELF"
        return cls()

    def get_kernel(self, symbol):
        return symbol


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


def test_a_source_in_another_encoding_compiles(cache, tmp_path):
    file = tmp_path / "latin.cu"
    file.write_bytes(b'// Gr\xf6\xdfe\nextern "C" __global__ void f(int* x) { *x = 1; }\n')
    assert [p.name for p in Kernel(file, "f").parameters] == ["x"]
    assert Kernel(file, "f").compile("sm_80").code[:4] == b"\x7fELF"

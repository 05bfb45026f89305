import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import triton

from nearlight.core import cuda_sources
from nearlight.core.cuda_sources import has_macro_header, source_of, sources

ROW_SUM = Path(__file__).parent / "kernels" / "row_sum.cu"


@pytest.fixture
def tree(tmp_path):
    """Write files by their name in a folder, and return it."""

    def write(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_", ".")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def names(folder, file="k.cu"):
    return sorted(sources(folder / file).keys() - {file})


def test_headers_of_nearlight_are_followed_and_those_of_packages_known_by_version():
    assert "#include <cuda_bf16.h>" in ROW_SUM.read_text()
    reduce = cuda_sources.INCLUDE / "nearlight" / "reduce.cuh"
    assert sources(ROW_SUM) == {
        "row_sum.cu": ROW_SUM.read_text(),
        str(reduce): reduce.read_text(),
    }
    found = cuda_sources.package_versions()
    assert found["triton"] == triton.__version__
    installed = {"nvidia-cuda-nvrtc", "nvidia-cuda-cccl"} & found.keys()
    assert found == {"triton": triton.__version__} | {name: version(name) for name in installed}
    assert (cuda_sources.libcudacxx() is None) or "nvidia-cuda-cccl" in str(found)


def test_the_versions_of_cudas_packages_are_known_by_any_name(tmp_path, monkeypatch):
    installed = ("nvidia_cuda_cccl_cu12-12.9.27", "nvidia_cuda_nvrtc-13.5.37", "nvidia_cublas-1.0")
    for name in installed:
        (tmp_path / f"{name}.dist-info").mkdir()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    real = cuda_sources.find_spec
    monkeypatch.setattr(cuda_sources, "find_spec", lambda n: spec if n == "nvidia" else real(n))
    cuda_sources.package_versions.cache_clear()
    assert cuda_sources.package_versions() == {
        "nvidia-cuda-cccl-cu12": "12.9.27",
        "nvidia-cuda-nvrtc": "13.5.37",
        "triton": triton.__version__,
    }
    cuda_sources.package_versions.cache_clear()


def test_headers_of_one_name_in_two_folders_are_two_headers(tree):
    folder = tree(
        k_cu='#include "a/a.h"\n#include "b/b.h"\n',
        a__a_h='#include "v.h"\n',
        b__b_h='#include "v.h"\n#include "../a/a.h"\n',
        a__v_h="1",
        b__v_h="2",
    )
    assert names(folder) == [str(folder / f) for f in ("a/a.h", "a/v.h", "b/b.h", "b/v.h")]


def test_every_spelling_of_an_include_is_followed(tree):
    folder = tree(
        k_cu="#include <a.h>\n"
        '# /* why */ include /* it */ "b.h"\n'
        '#include \\\n"c.h"\n'
        "#if __has_include(<d.h>)\n#endif\n"
        '#include "absent.h"\n'
        f'#include "{"long" * 100}.h"\n',
        a_h="#include_next <a.h>\n",
        b_h='#include "k.cu"\n',  # a cycle
        c_h="",
        d_h="",
    )
    assert names(folder) == [str(folder / f) for f in ("a.h", "b.h", "c.h", "d.h", "k.cu")]


def test_the_folder_of_libcudacxx_is_found_in_either_layout(tmp_path, monkeypatch):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    for layout in ("cu13/include/cccl", "cuda_cccl/include"):
        cuda_sources.libcudacxx.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(cuda_sources, "find_spec", lambda name: spec)
            before = cuda_sources.libcudacxx()
            (tmp_path / layout / "cuda" / "std").mkdir(parents=True)
            (tmp_path / layout / "cuda" / "std" / "cmath").touch()
            cuda_sources.libcudacxx.cache_clear()
            assert before is None and cuda_sources.libcudacxx() == tmp_path / layout
        shutil.rmtree(tmp_path / layout)
    cuda_sources.libcudacxx.cache_clear()


def test_headers_beside_a_link_are_found_where_the_link_is(tree):
    folder = tree(k_cu='#include "a/l.h"\n', a__v_h="1", b__v_h="2", b__real_h='#include "v.h"\n')
    (folder / "a" / "l.h").symlink_to(folder / "b" / "real.h")
    assert names(folder) == [str(folder / "a" / "l.h"), str(folder / "a" / "v.h")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#include HEADER", True),
        ("  # include\\\n NAME(x)", True),
        ("/* why */ #/**/include/**/NAME", True),
        ("%:include NAME", True),
        ("#if __has_include(NAME)", True),
        ("// #include words", False),
        ("// why \\\n#include words", False),
        ("char a = '\"'; // \"\n#include NAME", True),
        ("/*\n#include words\n*/", False),
        ('#include "a.h"\nint x;', False),
        ('#if __has_include("a.h")', False),
    ],
)
def test_headers_named_by_a_macro_are_told(tree, text, expected):
    folder = tree(k_cu='#include "v.h"\n', v_h=text)
    assert has_macro_header(sources(folder / "k.cu")) is expected


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    file = tmp_path / "k.cu"
    file.write_bytes(b"\xef\xbb\xbf__global__ void f(int* x) { *x = 1; } // \xe9\n")
    assert source_of(file) == "__global__ void f(int* x) { *x = 1; } // \udce9\n"
    assert sources(file) == {"k.cu": source_of(file)}

import shutil
from pathlib import Path

import pytest

from nearlight.core import cuda_sources
from nearlight.core.cuda_sources import has_macro_header, own_sources, sources

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


def test_headers_of_nearlight_and_of_cuda_are_followed():
    found = sources(ROW_SUM)
    assert found["row_sum.cu"] == ROW_SUM.read_text()
    assert str(cuda_sources.INCLUDE / "nearlight" / "reduce.cuh") in found
    assert any(name.endswith("/cuda_bf16.h") for name in found)
    assert any(name.endswith("/cuda_bf16.hpp") for name in found)  # included by that header


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


def test_own_sources_are_those_that_no_package_brings(tree):
    folder = tree(
        k_cu='#include <cuda_bf16.h>\n#include "nearlight/reduce.cuh"\n#include "a.h"\n', a_h="1"
    )
    found = own_sources(folder / "k.cu")
    assert list(found) == [str(folder / "k.cu"), str(folder / "a.h")] and found[str(folder / "a.h")]


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

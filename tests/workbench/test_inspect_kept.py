import subprocess
import sys
from pathlib import Path

import pytest

from nearlight.core import cuda_sources, tuned
from nearlight.core.cuda_sources import libcudacxx
from nearlight.core.errors import BadInput
from nearlight.workbench import inspect as inspecting
from nearlight.workbench.inspect_kept import inspect_kept

HERE = Path(__file__).parent


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Count the answers that were worked out, not taken from the disk."""
    found = []

    def counted(*arguments, **options):
        found.append(arguments)
        return original(*arguments, **options)

    original = inspecting.inspect
    monkeypatch.setattr(inspecting, "inspect", counted)
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "cache"))
    return found


def test_an_answer_holds_until_its_source_or_a_header_changes(calls, tmp_path):
    file, header = tmp_path / "k.cu", tmp_path / "value.cuh"
    file.write_text('#include "value.cuh"\n__global__ void f(int* x) { *x = VALUE; }\n')
    header.write_text("#define VALUE 1\n")
    first = inspect_kept(str(file), ["sm_80"])
    again = inspect_kept(str(file), ["sm_80"])
    assert len(calls) == 1
    assert again.to_dict() == {**first.to_dict(), "findings": tuple(first.findings)}
    header.write_text("#define VALUE clock()\n")
    inspect_kept(str(file), ["sm_80"])
    assert len(calls) == 2
    inspect_kept(str(file), ["sm_90"])
    inspect_kept(str(file), ["sm_90"], block=64)
    assert len(calls) == 4


def test_an_answer_holds_until_a_file_that_the_target_reads_changes(calls, tmp_path):
    (tmp_path / "block.txt").write_text("64")
    (tmp_path / "k.py").write_text(
        "from pathlib import Path\nimport triton\nimport triton.language as tl\n"
        "SIZE: tl.constexpr = int((Path(__file__).parent / 'block.txt').read_text())\n"
        "@triton.jit\ndef f(x_ptr: '*fp32', BLOCK: tl.constexpr = SIZE):\n"
        "    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)\n"
    )
    for text in ("64", "64", "128"):
        (tmp_path / "block.txt").write_text(text)
        inspect_kept(f"{tmp_path / 'k.py'}:f", ["sm_80"])
    assert len(calls) == 2


def test_an_answer_holds_until_a_launch_is_tuned(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "user_path", lambda name, gpu: tmp_path / "t" / gpu / f"{name}.json")
    target = f"{HERE / 'kernels' / 'inspected.cu'}:sum"
    inspect_kept(target, ["sm_80"])
    (tmp_path / "t" / "h200").mkdir(parents=True)
    (tmp_path / "t" / "h200" / "sum.json").write_text("{}")
    inspect_kept(target, ["sm_80"])
    assert len(calls) == 2


def test_an_answer_is_not_kept_where_a_macro_names_a_header(calls, tmp_path):
    (tmp_path / "k.cu").write_text(
        '#define HEADER "value.cuh"\n#include HEADER\n__global__ void f(int* x) { *x = VALUE; }\n'
    )
    found = []
    for value in ("1", "x[1]"):
        (tmp_path / "value.cuh").write_text(f"#define VALUE {value}\n")
        found += inspect_kept(str(tmp_path / "k.cu"), ["sm_80"]).rows
    assert len(calls) == 2 and [row["global_loads"] for row in found] == [0, 1]


@pytest.mark.skipif(libcudacxx() is None, reason="CUB comes with an extra")
def test_an_answer_about_a_kernel_with_cub_is_kept_for_its_version(calls, tmp_path, monkeypatch):
    file = tmp_path / "k.cu"
    file.write_text("#include <cub/warp/warp_reduce.cuh>\n__global__ void f(int* x) { *x = 1; }\n")
    for _ in range(2):
        inspect_kept(str(file), ["sm_80"])
    assert len(calls) == 1
    newer = {**cuda_sources.package_versions(), "nvidia-cuda-cccl": "99.0"}
    monkeypatch.setattr(cuda_sources, "package_versions", lambda: newer)
    inspect_kept(str(file), ["sm_80"])
    assert len(calls) == 2


def test_errors_are_not_kept(calls, tmp_path):
    for _ in range(2):
        with pytest.raises(BadInput, match="no file"):
            inspect_kept(str(tmp_path / "nothing.cu"))
    assert len(calls) == 2


def test_a_kept_answer_needs_no_torch(calls, tmp_path):
    target = f"{HERE / 'inspected.py'}:_copy_kernel"
    line = (
        "import sys; from nearlight.workbench.inspect_kept import inspect_kept\n"
        f"report = inspect_kept({target!r}, ['sm_80'])\n"
        "print('torch' in sys.modules, len(report.rows), type(report.findings[0]).__name__)"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [done.stdout.strip() for done in outputs] == ["True 1 Finding", "False 1 Finding"]

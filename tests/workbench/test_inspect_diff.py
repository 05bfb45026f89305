from pathlib import Path

import pytest

from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect

HERE = Path(__file__).parent
CU = str(HERE / "kernels" / "inspected.cu")
PY = str(HERE / "inspected.py")


def test_two_kernels_of_different_languages_stand_side_by_side():
    report = inspect(f"{CU}:copy<float>", other=f"{PY}:_copy_kernel", block=256)
    left, right = report.rows
    assert left["kernel"] == right["kernel"] == "copy<float> → _copy_kernel bf16"
    assert (left["target"], right["target"]) == (f"{CU}:copy<float>", f"{PY}:_copy_kernel")
    assert left["arch"] == right["arch"] == "sm_90a"
    assert f"registers {left['registers']} → {right['registers']}" in report.answer
    assert "num threads 256 → 128" in report.answer


def test_a_kernel_does_not_differ_from_itself():
    report = inspect(f"{CU}:sum", ["sm_80"], other=f"{CU}:sum")
    assert report.answer == "on sm_80, sum: no difference"
    assert report.rows[1]["target"].endswith("again")


def test_kernels_of_one_name_are_paired_and_strangers_are_refused(tmp_path):
    other = tmp_path / "other.cu"
    other.write_text("__global__ void sum(float* x) { *x = 1; }\n__global__ void mine() {}\n")
    report = inspect(CU, ["sm_80"], other=str(other))
    assert [row["kernel"] for row in report.rows] == ["sum", "sum"]
    other.write_text("__global__ void mine() {}\n")
    with pytest.raises(BadInput, match="no kernel stands in both.*has spills.*has mine"):
        inspect(CU, ["sm_80"], other=str(other))

from pathlib import Path

import pytest

from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect
from nearlight.workbench.inspect_diff import diff_report
from nearlight.workbench.inspect_target import Target
from nearlight.workbench.load import load_op
from nearlight.workbench.new import new

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
    report = inspect(f"{CU}:copy<float>", other=f"{PY}:_tuned_kernel", constants="BLOCK=(64)")
    assert report.next.endswith(f"nearlight inspect {PY}:_tuned_kernel --constants 'BLOCK=(64)'")


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


def test_ops_of_one_name_in_two_languages_are_compared(tmp_path):
    files = []
    for lang in ("triton", "cuda"):
        new("twofold", lang, tmp_path / lang)
        files.append(str(tmp_path / lang / "twofold.py"))
    report = inspect(files[0], ["sm_90"], other=files[1])
    assert [row["kernel"] for row in report.rows[::2]] == [
        "_twofold_fwd_kernel bf16 → twofold_fwd<__nv_bfloat16, float>",
        "_twofold_bwd_kernel bf16/fp32 → twofold_bwd<__nv_bfloat16, float>",
    ]
    assert f"in {files[0]} alone: _column_sum_kernel; in {files[1]} alone: " in report.setup
    assert "twofold_bwd<double, double>" in report.setup and report.next.endswith(files[1])
    report = inspect(f"{files[1]}:twofold_bwd", ["sm_90"], other=f"{files[0]}:_twofold_bwd_kernel")
    assert len(report.rows) == 2
    with pytest.raises(ValueError, match="twofold_ops::twofold_.* is defined in .* and again in"):
        load_op(files[1])


PAIRED = [
    (["f bf16", "g"], ["g", "f bf16"], ["f bf16-f bf16", "g-g"]),
    (["_f_kernel bf16 #1", "_f_kernel bf16 #2"], ["a::f<b, c>", "f(int*)"],
     ["_f_kernel bf16 #1-a::f<b, c>", "_f_kernel bf16 #2-f(int*)"]),
    (["_f_fwd_kernel", "_sum_kernel fp32"], ["h", "f_fwd<c, d>"],
     ["_f_fwd_kernel-f_fwd<c, d>", "_sum_kernel fp32-h"]),
    (["f", "g", "h"], ["_f_kernel", "i", "j"], ["f-_f_kernel"]),
    (["_f_kernel bf16/fp32"], ["f<float, float>", "f<__nv_bfloat16, float>"],
     ["_f_kernel bf16/fp32-f<__nv_bfloat16, float>"]),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right", "paired"), PAIRED)
def test_kernels_are_paired_by_name_and_those_left_alone_are_told(left, right, paired):
    targets = [Target("a.py", list), Target("b.cu", list)]
    rows = [[{"kernel": label} for label in each] for each in (left, right)]
    report = diff_report(targets, "sm_80", rows, ["", "--block 256"])
    found = [row["kernel"].replace(" → ", "-") for row in report.rows[::2]]
    assert [pair for pair in paired if "-" in pair] == [
        label if "-" in label else f"{label}-{label}" for label in found
    ]
    is_all = len(paired) == len(left)
    assert ("in a.py alone: g, h; in b.cu alone: i, j" in report.setup) == (not is_all)
    assert report.setup.endswith("for the occupancy say what b.cu is launched with: --block 256")


def test_strangers_are_named_as_a_target_names_them():
    rows = [[{"kernel": "f<a, b> #1"}, {"kernel": "g(int*)"}], [{"kernel": "_h bf16/fp32 #2"}]]
    with pytest.raises(BadInput, match=r"a.cu has f<a, b>, g\(int\*\); b.py has _h$"):
        diff_report([Target("a.cu", list), Target("b.py", list)], "sm_80", rows)

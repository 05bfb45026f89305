"""Property 11: what compute-sanitizer's reports say, and that its verdict is the property's."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from nearlight.workbench.launches import launches
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import sanitizer
from nearlight.workbench.property import NotApplicable
from nearlight.workbench.trial import Trial

TWINS = Path(__file__).with_name("twins.py")

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale_fwd(float *, const float *, long long)+0x90 in scale.cu:14
=========     by thread (5,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Invalid __global__ read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at row_sum(float *)+0x1a0 in row_sum.cu:21
=========     and Read access at row_sum(float *)+0x210 in row_sum.cu:24 [124 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
COPIES = """\
========= Error: Race reported between Write access at _norm_kernel+0x470 in kernels.py:78
=========     and Write access at _norm_kernel+0x470 in kernels.py:78 [28 hazards]
=========
"""
CLEAN = """\
========= COMPUTE-SANITIZER
launched: ["scale_fwd"]
========= ERROR SUMMARY: 0 errors
"""


def test_an_error_names_its_kernel_and_line():
    (fault,) = sanitizer.faults(MEMCHECK, ["scale_fwd"])
    assert str(fault) == (
        "Invalid __global__ write of size 4 bytes "
        "at scale_fwd(float *, const float *, long long)+0x90 in scale.cu:14"
    )
    (race,) = sanitizer.faults(RACECHECK, ["row_sum"])
    assert "Race reported between Write access at row_sum" in str(race)
    assert "row_sum.cu:24" in str(race)


def test_copies_that_triton_stores_twice_are_no_race():
    assert sanitizer.faults(COPIES, ["_norm_kernel"]) == []
    for changed in (
        COPIES.replace("and Write", "and Read"),
        COPIES.replace(
            "and Write access at _norm_kernel+0x470", "and Write access at _norm_kernel+0x490"
        ),
        COPIES.replace("kernels.py", "kernels.cu"),
    ):
        assert len(sanitizer.faults(changed, ["_norm_kernel"])) == 1


def test_kernels_of_others_are_not_the_ops_unless_nothing_is_known():
    assert sanitizer.faults(MEMCHECK, ["rope_fwd"]) == []
    assert len(sanitizer.faults(MEMCHECK, [])) == 2
    assert sanitizer.faults(CLEAN, []) == []


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A sanitizer that runs its command and then prints the report that is put beside it."""

    def install(report: str) -> Path:
        (tmp_path / "report.txt").write_text(report)
        (tmp_path / "tool.py").write_text(
            "import pathlib, subprocess, sys\n"
            "here = pathlib.Path(__file__).parent\n"
            "(here / 'seen.txt').write_text(' '.join(sys.argv[1:3]))\n"
            "code = subprocess.run(sys.argv[5:]).returncode\n"
            "print((here / 'report.txt').read_text())\n"
            "sys.exit(code)\n"
        )
        file = tmp_path / "compute-sanitizer"
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "tool.py"} "$@"\n')
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path

    return install


def examine(tool_name: str) -> str:
    op = load_op(str(TWINS))
    return sanitizer.examine(op, Trial(op.check_cases[0], step=tool_name), "cpu")


def test_the_tools_verdict_is_the_propertys(tool):
    folder = tool("========= ERROR SUMMARY: 0 errors\n")
    with launches() as seen:
        assert examine("racecheck") == ""
    assert {name for name, _ in seen} == {"_scale_fwd_kernel", "_scale_bwd_kernel"}
    assert (folder / "seen.txt").read_text() == "--tool racecheck"
    tool(MEMCHECK.replace("scale_fwd", "_scale_fwd_kernel"))
    assert examine("memcheck").startswith("memcheck: Invalid __global__ write of size 4 bytes at")


def test_why_the_op_did_not_run_is_said_and_not_the_advice_below_it(tool):
    folder = tool("")
    (folder / "tool.py").write_text(
        "import sys\n"
        "print('AcceleratorError: CUDA error: out of memory', file=sys.stderr)\n"
        "print('Compile with `TORCH_USE_CUDA_DSA` to enable assertions.', file=sys.stderr)\n"
        "sys.exit(1)\n"
    )
    assert examine("synccheck") == (
        "synccheck: the op did not run under it: AcceleratorError: CUDA error: out of memory"
    )


def test_where_it_has_nothing_to_say(monkeypatch):
    op = load_op(str(TWINS))
    with pytest.raises(NotApplicable, match="on a GPU"):
        list(sanitizer.trials(op, False, "cpu"))
    monkeypatch.setattr(sanitizer, "path", lambda: None)
    with pytest.raises(NotApplicable, match="pip install nvidia-cuda-sanitizer-api"):
        list(sanitizer.trials(op, False, "cuda"))
    monkeypatch.setattr(sanitizer, "path", lambda: "compute-sanitizer")
    steps = [trial.step for trial in sanitizer.trials(op, False, "cuda")]
    assert steps == list(sanitizer.TOOLS)
    with pytest.raises(ValueError, match="allowed are memcheck"):
        sanitizer.examine(op, Trial(op.check_cases[0], step="speedcheck"), "cuda")

"""The pytest plugin: tests of properties by name, the fixture, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

# Here and not in a test: pytester forgets what a test imports, and torch cannot be loaded twice.
from nearlight.ops import OPS
from nearlight.workbench import pytest as plugin
from nearlight.workbench.new import new
from nearlight.workbench.properties import PROPERTIES

pytest_plugins = ["pytester"]
WriteOp = Callable[..., Path]


@pytest.fixture
def run(pytester: pytest.Pytester):
    def call(*arguments: object) -> pytest.RunResult:
        plugins = ("-p", plugin.__name__, "-p", "no:cacheprovider", "-v")
        return pytester.runpytest_inprocess(*plugins, *arguments)

    return call


def test_an_op_gets_a_test_for_each_property(run, pytester: pytest.Pytester, write_op: WriteOp):
    write_op(body="x.stride() == (5, 1) and os._exit(7)").rename(pytester.path / "my_op.py")
    result = run("--nearlight-op", "my_op.py:OP", "-k", "values or sanitizer")
    result.assert_outcomes(failed=1, skipped=1, deselected=num_properties() - 2)
    result.stdout.fnmatch_lines(
        [
            "my_op.py::OP[[]values] FAILED*",
            "my_op.py::OP[[]sanitizer] SKIPPED (compute-sanitizer watches*",
            "values: ended the process with exit code 7",
            "  import torch; from nearlight.workbench.check import reproduce; *'values'*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_quick_takes_the_quick_properties_and_more_ops(
    run, pytester: pytest.Pytester, write_op: WriteOp
):
    write_op(top="undefined").rename(pytester.path / "my_op.py")
    options = ["--nearlight-op", "my_op.py", "--nearlight-op", "swiglu", "--nearlight-quick"]
    result = run(*options, "-k", "poison")
    result.assert_outcomes(failed=1, passed=1, deselected=2 * (num_properties(True) - 1))
    result.stdout.fnmatch_lines(["swiglu::OP[[]poison] PASSED*", "*my_op.py:7: NameError: *"])


def test_an_op_is_proved_in_one_child(run, pytester: pytest.Pytester, write_op: WriteOp):
    write_op(top="open(__file__ + '.loaded', 'a').write('x')").rename(pytester.path / "my_op.py")
    run("--nearlight-op", "my_op.py", "-k", "values or poison or extremes").assert_outcomes(
        passed=3, deselected=num_properties() - 3
    )
    assert (pytester.path / "my_op.py.loaded").read_text() == "x"


@pytest.mark.slow
def test_an_op_is_proved_by_one_worker_of_xdist(pytester: pytest.Pytester, write_op: WriteOp):
    write_op(top="open(__file__ + '.loaded', 'a').write('x')").rename(pytester.path / "my_op.py")
    options = ("--nearlight-op", "my_op.py", "-k", "values or poison", "-n", "2")
    result = pytester.runpytest_subprocess("-p", plugin.__name__, *options, "--dist", "loadfile")
    result.assert_outcomes(passed=2)
    assert (pytester.path / "my_op.py.loaded").read_text() == "x"


def test_a_file_that_is_not_there_is_a_usage_error(run):
    result = run("--nearlight-op", "absent.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--nearlight-op absent.py: no file *absent.py"])


@pytest.mark.parametrize("source", ["", "swigluu"])
def test_an_op_that_is_none_of_ours_is_one_usage_error(run, source: str):
    assert source not in OPS
    result = run("--nearlight-op", source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--nearlight-op '{source}': no op called '{source}'; nearest*"])
    result.stdout.no_fnmatch_line("*FAILED*")


def test_the_fixture_proves_files_beside_the_test_and_records(
    run, pytester: pytest.Pytester, write_op: WriteOp
):
    folder = pytester.mkdir("tests")
    write_op().rename(folder / "good.py")
    write_op(body="return 3 * x").rename(folder / "bad.py")
    (folder / "test_ops.py").write_text(
        "from nearlight.workbench.load import load_op\n"
        "BAD = load_op(__file__.replace('test_ops', 'bad'))\n"
        "def test_good(check_op):\n"
        "    assert check_op('good.py', quick=True).proof.passed\n"
        "def test_bad(check_op):\n"
        "    check_op(BAD, only=['values'])\n",
        encoding="utf-8",
    )
    result = run("tests")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "twice: 0 of 1 properties hold; broken: values",
            "values: output*",
            "  import torch; from nearlight.workbench.check import reproduce; *bad.py:OP*",
        ]
    )


def test_the_fixture_warns_of_what_was_not_run(run, pytester: pytest.Pytester):
    new("piece", "cuda", pytester.path)
    (pytester.path / "test_piece.py").write_text(
        "def test_piece(check_op):\n    check_op('piece.py', only=['values', 'machine code'])\n",
        encoding="utf-8",
    )
    result = run("test_piece.py")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*piece: values not run; 1 of 1 properties hold, 1 needs a GPU*"])


def num_properties(quick: bool = False) -> int:
    return sum(prop.in_quick or not quick for prop in PROPERTIES)

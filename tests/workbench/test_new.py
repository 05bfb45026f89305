"""`new`: what it writes is an op in the fixed order that passes its check; what it refuses."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearlight import cli
from nearlight.core import cuda
from nearlight.core.builds import check_budget, compile_build
from nearlight.core.errors import BadInput
from nearlight.core.hardware import GPUS, find_gpu
from nearlight.core.op import Op
from nearlight.workbench import bench
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op
from nearlight.workbench.new import LANGUAGES, new, render
from nearlight.workbench.trial import Trial, make_inputs
from nearlight.workbench.work import Machine

edit = runpy.run_path(str(Path(__file__).with_name("edited.py")))["edit"]
ORDER = "reference Config config forward backward _backward_op _forward_op gain OP".split()


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Leave the folders of the loaded files off the path: an op must not hide what is there."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return an op's record by its language, each from a folder of its own."""
    folders = {lang: tmp_path_factory.mktemp(lang) for lang in LANGUAGES}
    for lang, folder in folders.items():
        new(f"{lang}_gain", lang, folder)
    return {
        lang: (folder, load_op(str(folder / f"{lang}_gain.py"))) for lang, folder in folders.items()
    }


def test_the_triton_op_passes_the_quick_check(written):
    _, op = written["triton"]
    report = check(op, quick=True)
    assert report.proof.passed, report.rows
    # Those of the check's run-time properties that a quick check has say something of it.
    found = {row["property"]: row["status"] for row in report.rows}
    assert {found[name] for name in ("values", "layouts", "poison")} == {"passed"}
    assert "_triton_gain_bwd_kernel" in report.setup


def test_the_cuda_op_says_what_cannot_be_proved_without_a_gpu_and_fails_nothing(written):
    _, op = written["cuda"]
    rows = check(op, quick=True).rows
    assert not [row for row in rows if row["status"] == "failed"]
    (values,) = (row for row in rows if row["property"] == "values")
    assert values["status"] == "not applicable" and values["reason"] == "needs a GPU"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_its_inputs_in_fp64_are_no_numbers_of_fp32(written, lang):
    _, op = written[lang]
    (case,) = (case for case in op.check_cases if case.dtype == torch.float64)
    for tensor in make_inputs(op, Trial(case), "cpu").values():
        assert not torch.equal(tensor, tensor.float().double())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_its_kernels_keep_their_budgets(written, lang):
    _, op = written[lang]
    builds = op.builds("sm_90")
    # Forward, backward and its sum; in CUDA C++ of each dtype, for nothing else compiles them.
    assert len(builds) == (3 if lang == "triton" else 3 * len({c.dtype for c in op.check_cases}))
    for build in builds:
        assert check_budget(build, compile_build(build, "sm_90")) == []


@pytest.mark.slow
@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_written_test_passes(written, lang):
    folder, _ = written[lang]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout or torch.cuda.is_available()


def edited(file: Path, lang: str, right: str = "", wrong: str = "") -> Op:
    """Return x · sigmoid(x), made from a new op at the three places, with a fault if asked for."""
    new(file.stem, lang, file.parent)
    edit(file, lang)
    text = file.read_text("utf-8")
    assert right in text
    file.write_text(text.replace(right, wrong), "utf-8")
    return load_op(str(file))


def test_edits_at_the_three_places_make_another_op_with_other_arguments(tmp_path):
    report = check(edited(tmp_path / "swish.py", "triton"), quick=True)
    assert report.proof.passed, report.rows
    assert "_bwd_kernel" in report.setup


def test_a_fault_of_such_an_edit_is_found(tmp_path):
    op = edited(
        tmp_path / "wrong_silu.py", "triton", "(1.0 + x * (1.0 - s))", "(1.0 - x * (1.0 - s))"
    )
    (row,) = check(op, quick=True, only=["values"]).rows
    assert row["status"] == "failed" and "gradient of x" in row["reason"]


def test_the_same_edits_in_cuda_compile_and_a_launch_that_does_not_fit_is_found(tmp_path):
    builds = edited(tmp_path / "cuda_silu.py", "cuda").builds("sm_90")
    names = [compile_build(build, "sm_90").name for build in builds]
    assert ["silu_fwd" in names[0], "silu_bwd" in names[1]] == [True, True]
    # Without a GPU the backward is never launched but here.
    right, wrong = "dy, x, dx, *x.shape", "dy, x, dx, x.shape[0]"
    op = edited(tmp_path / "short_silu.py", "cuda", right, wrong)
    with pytest.raises(TypeError, match=r"silu.cu:17: short_silu_bwd<.* takes 9 arguments .*got 8"):
        op.builds("sm_90")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_op_file_keeps_the_fixed_order_and_its_length(lang):
    text = render("gain", lang)["gain.py"]
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names.append(node.targets[0].id)
    assert ast.get_docstring(ast.parse(text)).startswith("gain: ")
    places = [names.index(name) for name in ORDER]
    assert places == sorted(places)
    kernels = [names.index(name) for name in names if "kernel" in name]
    assert kernels and names.index("config") < min(kernels)
    assert max(kernels) < names.index("forward")
    assert len([line for line in text.splitlines() if line]) <= 200
    assert len(render("gain", "cuda")["gain.cu"].splitlines()) <= 80


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_is_written_is_formatted_and_clean(written, lang):
    folder, _ = written[lang]
    settings = ["--isolated", "--line-length", "100"]
    for command in (["format", "--check", *settings], ["check", "--select", "E,F,B,UP", *settings]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_launch_covers_every_shape_and_declares_its_workspace(written, lang):
    _, op = written[lang]
    config = sys.modules[op.reference.__module__].config
    for shape in ((1, 1), (1, 70_000), (70_000, 3), (2**22, 8), (16384, 4096)):
        for dtype in (torch.bfloat16, torch.float64):
            for gpu in (None, *GPUS.values()):
                chosen = config(shape, dtype, gpu)
                assert 1 <= chosen.groups <= min(shape[0], 65_535)
                if lang == "cuda":
                    assert chosen.across * chosen.down == 256  # as many as the .cu file holds
    case = next(case for case in op.cases if case.name == "16384x4096")
    groups = config((16384, 4096), case.dtype, find_gpu("h200")).groups
    assert op.extra_bytes(case) >= groups * 4096 * 4


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_is_timed_beside_plain_pytorch(written, lang, monkeypatch):
    _, op = written[lang]
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(bench, "MIN_REPEATS", 2)
    cases = [next(case for case in op.check_cases if case.shape["columns"] == 65)]
    rows = bench.measure(op, Machine("cpu", find_gpu("h200")), cases=cases)
    timed = {row["implementation"] for row in rows if row.get("time_us", 0) > 0}
    assert {"nearlight", "torch", "compile"} <= timed


def test_a_backend_is_chosen_by_the_language_and_a_forced_one_is_never_replaced(written):
    x, weight = torch.randn(3, 4), torch.randn(4)
    (_, triton_op), (_, cuda_op) = written["triton"], written["cuda"]
    expected = triton_op.reference(x, weight)
    torch.testing.assert_close(triton_op.function(x, weight, backend="triton"), expected)
    torch.testing.assert_close(cuda_op.function(x, weight), expected)
    with pytest.raises(cuda.NoEmulator):
        cuda_op.function(x, weight, backend="cuda")
    with pytest.raises(ValueError, match="'triton': allowed are auto, cuda, reference"):
        cuda_op.function(x, weight, backend="triton")


def test_the_report_names_the_files_the_places_to_edit_and_the_next_command(tmp_path):
    report = new("gain", "cuda", tmp_path / "my ops")
    for name in ("gain.py", "gain.cu", "test_gain.py"):
        assert (tmp_path / "my ops" / name).is_file() and name in report.setup
    where = [row["where"] for row in report.rows]
    assert len(where) == 3 and "gain.cu:" in where[1]
    for place in ", ".join(where).split(", "):
        file, _, line = place.rpartition(":")
        assert "EDIT" in Path(file).read_text().splitlines()[int(line) - 1]
    assert report.next == f"nearlight check '{tmp_path}/my ops/gain.py'"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("class", "identifier"),
        ("my-op", "identifier"),
        ("Gain", "identifier"),
        ("2x", "identifier"),
        ("../gain", "identifier"),
        ("test_gain", "begin with test_"),
        ("conftest", "by itself"),
        ("setup", "by itself"),
        ("sum", "would hide"),
        ("torch", "would hide"),
        ("json", "would hide"),
        ("swiglu", "nearlight has an op"),
        ("config", "for something else"),
        ("weight", "for something else"),
    ],
)
def test_a_name_that_will_not_do_is_refused(tmp_path, name, reason):
    with pytest.raises(BadInput, match=reason):
        new(name, "triton", tmp_path)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_gain.py").write_text("mine")
    (tmp_path / "file").write_text("")
    for arguments, words in (
        (["gain", "--lang", "triton", "--dir", str(tmp_path)], "test_gain.py exists"),
        (["gain", "--lang", "rust", "--dir", str(tmp_path)], "allowed are triton, cuda"),
        (["gain", "--lang", "cuda", "--dir", str(tmp_path / "file")], "cannot be written"),
    ):
        monkeypatch.setattr(sys, "argv", ["nearlight", "new", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "test_gain.py"]
    assert (tmp_path / "test_gain.py").read_text() == "mine"


def test_the_command_line_writes_an_op_that_loads(tmp_path, monkeypatch, capsys):
    # A name that no other test takes: torch knows one op by a name.
    command = ["nearlight", "new", "commanded_gain", "--lang", "cuda", "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("commanded_gain: a complete op in CUDA C++") and lines[
        -1
    ].startswith("nearlight check ")
    assert isinstance(load_op(str(tmp_path / "commanded_gain.py")), Op)


def test_the_cuda_op_finds_its_kernels_from_a_link_elsewhere(written, tmp_path):
    folder, _ = written["cuda"]
    link = tmp_path / "linked.py"
    link.symlink_to(folder / "cuda_gain.py")
    text = link.read_text("utf-8").replace("cuda_gain_ops::", "linked_ops::")
    (tmp_path / "target").mkdir()
    for file in ("cuda_gain.cu", "cuda_gain.py"):
        (tmp_path / "target" / file).write_text((folder / file).read_text("utf-8"), "utf-8")
    (tmp_path / "target" / "cuda_gain.py").write_text(text, "utf-8")
    link.unlink()
    link.symlink_to(tmp_path / "target" / "cuda_gain.py")
    first, *_ = load_op(str(link)).builds("sm_90")
    assert compile_build(first, "sm_90").registers > 0

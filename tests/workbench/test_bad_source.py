"""Source that runs on no input is bad input, told by the compiler's lines; anything else is not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nearlight.core.errors import BadInput
from nearlight.core.op import KernelBuild
from nearlight.workbench.bad_source import refuse_builds
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op

WriteOp = Callable[..., Path]

TRITON = """
import triton.language as tl
from nearlight.core.triton import jit

@jit
def copy(y_ptr, x_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + n, n < 3), n < 3)
"""
LAUNCH = "copy[(1,)](torch.empty(8), x.detach(), N=8)"
CUDA = """
from pathlib import Path
from nearlight.core.cuda import Kernel

copy = Kernel(Path(__file__).with_name("copy.cu"), "copy")
"""
CU = "__global__ void copy(float* y, const float* x, int n) {\n  y[0] = x[0];\n}\n"
CU_LAUNCH = "copy[(1,), (32,)](torch.empty(8), x.detach(), 0)"


def complaint(file: Path, device: str = "cpu") -> str:
    """Return what a check says of a file it cannot run; every property is asked alone."""
    told = set()
    for prop in ("values", "layouts", "shapes"):
        with pytest.raises(BadInput) as caught:
            check(load_op(str(file)), only=[prop], device=device)
        told.add(str(caught.value))
    (text,) = told
    return text


def test_a_sound_launch_is_no_bad_source(write_op: WriteOp):
    report = check(load_op(str(write_op(top=TRITON, body=LAUNCH))), only=["values"])
    assert report.proof is not None and report.proof.passed
    assert "copy" in report.setup


def place(file: Path, words: str) -> str:
    """Return file and line of words in it."""
    before = file.read_text(encoding="utf-8").partition(words)[0]
    return f"{file}:{before.count(chr(10)) + 1}"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("n < 3)\n", "n < tree)\n", "NameError('tree is not defined')"),
        ("tl.arange(0, N)", "tl.arrange(0, N)", "has no attribute 'arrange'"),
        ("tl.arange(0, N)", "tl.arange(0, 2 + N)", "arange's range must be a power of 2"),
    ],
)
def test_a_triton_kernel_that_does_not_compile(
    write_op: WriteOp, right: str, wrong: str, message: str
):
    file = write_op(top=TRITON.replace(right, wrong), body=LAUNCH)
    first, *lines = complaint(file).splitlines()
    assert first.startswith(f"{place(file, wrong)}: ") and message in first
    assert any(wrong.strip() in line for line in lines)  # the compiler's own


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("x.detach(), ", "", "missing a required argument: 'x_ptr'"),
        ("N=8)", "N=8, num_wraps=4)", "`num_wraps`; did you mean `num_warps`?"),
        ("N=8)", "8, 9)", "too many positional arguments"),
        ("x.detach(), N", "'x', N", "str"),
    ],
)
def test_a_triton_launch_that_does_not_fit(write_op: WriteOp, right: str, wrong: str, message: str):
    text = complaint(write_op(top=TRITON, body=LAUNCH.replace(right, wrong)))
    fits_not = "in twice: the arguments do not fit copy(y_ptr, x_ptr, N): "
    assert text.startswith("twice.py:") and fits_not in text and message in text


def test_each_message_of_a_compiler_stands_once_with_its_line_and_a_caret(write_op: WriteOp):
    """Of the innermost function, wherever its file begins."""
    helper = "@jit\ndef inner(x):\n    '³'; return x + tree\n\n@jit\ndef copy"
    top = TRITON.replace("@jit\ndef copy", helper).replace("tl.load(", "inner(tl.load)(")
    top = top.replace("inner(tl.load)(x_ptr + n, n < 3)", "inner(tl.load(x_ptr + n, n < 3))")
    file = write_op(top=top, body=LAUNCH)
    shown = f"{place(file, 'return x + tree')}: NameError('tree is not defined')"
    assert complaint(file) == f"{shown}\n  '³'; return x + tree\n{' ' * 18}^"
    device_file = write_op(name="once", top=CUDA, body=CU_LAUNCH).with_name("copy.cu")
    device_file.write_text(CU.replace("x[0];", "z[0];"), encoding="utf-8")
    assert complaint(file.with_name("once.py")).splitlines() == [
        "copy.cu does not compile for sm_75:",
        f'{device_file}(2): error: identifier "z" is undefined',
        "    y[0] = z[0];",
        "           ^",
    ]


def test_a_number_where_a_pointer_belongs_does_not_compile(write_op: WriteOp):
    file = write_op(top=TRITON, body=LAUNCH.replace("x.detach()", "3"))
    assert complaint(file).startswith(f"{place(file, 'tl.store')}: ValueError: Unsupported ptr")


def test_a_launch_that_fails_for_some_inputs_is_a_broken_property(write_op: WriteOp):
    launch = LAUNCH.replace("N=8", "N=8 if len(x) < 9 else 7")
    file = write_op(top=TRITON, body=launch)
    (row,) = check(load_op(str(file)), only=["values"]).rows
    assert row["status"] == "failed" and "{'rows': 9, 'columns': 1}" in row["reproduce"]
    assert row["reason"].startswith("raised ValueError: arange's range must be a power of 2")
    assert row["reason"].endswith(f" at {place(file, 'tl.arange').rpartition('/')[2]} in copy")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("x[0];", "x[0]", 'copy.cu(3): error: expected a ";"'),
        ("void copy(", "void other(", "no kernel 'copy' in the source; it has other"),
        (", int n", "", "copy takes 2 arguments (float* y, float* x); got 3"),
        ("const float* x", "const double* x", "x points to double and takes torch.float64"),
        ("y, const float* x, int n", "y, int n, const float* x", "n is int and takes a number"),
    ],
)
def test_cuda_that_does_not_compile_or_fit(write_op: WriteOp, right: str, wrong: str, message: str):
    file = write_op(top=CUDA, body=CU_LAUNCH)
    file.with_name("copy.cu").write_text(CU.replace(right, wrong), encoding="utf-8")
    assert message in complaint(file)


def test_a_missing_file_or_kernel_is_named_with_the_line_that_launches_it(write_op: WriteOp):
    file = write_op(top=CUDA, body=CU_LAUNCH)
    source = file.with_name("copy.cu")
    launched = f"; launched at {place(file, CU_LAUNCH).rpartition('/')[2]} in twice"
    wanted = f"{source}, which is to have the kernel copy: No such file or directory"
    assert complaint(file) == wanted + launched
    source.write_text(CU.replace("void copy(", "void other("), encoding="utf-8")
    missing = f"{source}: no kernel 'copy' in the source; it has other"
    assert complaint(file) == missing + launched


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_cuda_for_newer_archs_is_bad_only_for_the_gpu_at_hand(
    write_op: WriteOp, monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool
):
    guard = "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000\n#error newer archs only\n#endif\n"
    file = write_op(top=CUDA, body=CU_LAUNCH)
    file.with_name("copy.cu").write_text(guard + CU, encoding="utf-8")
    if is_on_gpu:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
        assert "copy.cu does not compile for sm_89:\n" in complaint(file)
    else:
        rows = check(load_op(str(file)), only=["values", "shapes"]).rows
        assert [row["status"] for row in rows] == ["not applicable"] * 2


def test_builds_are_bad_where_none_compiles_whatever_else_the_record_does(write_op: WriteOp):
    file = write_op(top=CUDA, body=CU_LAUNCH)
    file.with_name("copy.cu").write_text("#if __CUDA_ARCH__ < 1000\n#error old\n#endif\n" + CU)
    op = load_op(str(file))
    kernel = sys.modules[op.function.__module__].copy

    def builds(arch: str) -> list[KernelBuild]:
        if arch == "sm_80":
            raise TypeError("the record's own")
        return [KernelBuild(kernel, {}, {})] if arch in built else []

    built = {"sm_89", "sm_100"}
    refuse_builds(dataclasses.replace(op, builds=builds))
    built = set()
    refuse_builds(dataclasses.replace(op, builds=builds))
    built = {"sm_89", "sm_90"}
    with pytest.raises(BadInput, match=r"copy.cu does not compile for sm_89:\n(.|\n)*: old"):
        refuse_builds(dataclasses.replace(op, builds=builds))


def test_a_device_file_that_is_not_there(write_op: WriteOp):
    assert "copy.cu" in complaint(write_op(top=CUDA, body=CU_LAUNCH))


def test_builds_that_do_not_fit_their_kernel(write_op: WriteOp):
    op = load_op(str(write_op(top=TRITON, body=LAUNCH)))
    kernel = sys.modules[op.function.__module__].copy
    short = KernelBuild(kernel, {"y_ptr": "*fp32"}, {"N": 8})
    with pytest.raises(BadInput, match=r"fit copy\(y_ptr, x_ptr, N\): .*`x_ptr` is missing"):
        check(dataclasses.replace(op, builds=lambda arch: [short]), only=["machine code"])


@pytest.mark.parametrize("option", ["--quick", "--only=machine code"])
@pytest.mark.parametrize("lang", ["triton", "cuda"])
def test_the_command_line_answers_with_exit_code_2(tmp_path: Path, lang: str, option: str):
    command = [sys.executable, "-m", "nearlight"]
    new = [*command, "new", "mine", "--lang", lang, "--dir", tmp_path]
    subprocess.run(new, check=True, capture_output=True)
    file = tmp_path / ("mine.py" if lang == "triton" else "mine.cu")
    store = "tl.store(y_ptr" if lang == "triton" else "= T(r * r * weight);"
    text = file.read_text(encoding="utf-8")
    line = text[: text.index(store)].count("\n") + 1
    file.write_text(text.replace(store, store.replace("store", "stroe").replace(";", "")))
    done = subprocess.run(
        [*command, "check", tmp_path / "mine.py", option],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    place = f"{file}:{line}: " if lang == "triton" else f"mine.cu({line + 1}): error: "
    assert place in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("used", "hint"),
    [
        ("tl.tanh(n)", "; tanh is in triton.language.extra.libdevice\n"),
        ("tl.math.where(n > 0, n, 0)", "; where is in triton.language\n"),
        ("tl.tangent(n)", "has no attribute 'tangent'\")\n"),
    ],
)
def test_a_function_of_another_module_of_triton_is_named_with_it(
    write_op: WriteOp, used: str, hint: str
):
    top = TRITON.replace("tl.load(x_ptr + n, n < 3)", used)
    assert hint in complaint(write_op(top=top, body=LAUNCH))

"""The user's own code: names of targets, whose a file is, the line an error came through."""

from __future__ import annotations

import json
import site
import sysconfig
from pathlib import Path

import pytest
import torch

import nearlight
from nearlight.core.user_code import is_own, package_root, place_of, split_name


@pytest.mark.parametrize(
    ("name", "file", "rest"),
    [
        ("my_op.py", "my_op.py", ""),
        ("a/my_op.py:NAME", "a/my_op.py", "NAME"),
        ("my_op.py:", "my_op.py", ""),
        ("/a b/k.cu:ns::scale<float, 4>", "/a b/k.cu", "ns::scale<float, 4>"),
        ("x.py.cu:k", "x.py.cu", "k"),
        ("rms_norm", None, "rms_norm"),
        ("happy", None, "happy"),
    ],
)
def test_a_name_is_split_into_file_and_rest(name: str, file: str | None, rest: str):
    assert split_name(name) == (file and Path(file), rest)


def test_own_are_ops_and_the_users_files_alone():
    package = Path(nearlight.__file__).parent
    assert is_own(__file__) and is_own(str(package / "ops" / "rope" / "kernels.py"))
    others = (package / "core" / "op.py", json.__file__, torch.__file__, "<string>")
    assert not any(is_own(str(file)) for file in others)
    for folder in (sysconfig.get_path("purelib"), site.getusersitepackages(), "/l/dist-packages"):
        assert not is_own(f"{folder}/somebody/x.py") and not is_own(f"{folder}/")


def test_the_place_of_an_error_is_the_innermost_own_line():
    def multiply() -> None:
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError) as caught:
        multiply()
    line = multiply.__code__.co_firstlineno + 1
    assert place_of(caught.value) == f"test_user_code.py:{line} in multiply"
    assert place_of(caught.value, is_long=True) == f"{__file__}:{line}"
    assert place_of(ValueError("never raised")) == ""
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\nx = = 2\n", "/home/me/my_op.py", "exec")
    assert place_of(caught.value, is_long=True) == "/home/me/my_op.py:2"


def test_a_package_begins_where_no_folder_above_is_one(tmp_path: Path):
    inner = tmp_path / "kit" / "ops"
    inner.mkdir(parents=True)
    assert package_root(inner / "a.py") == (inner.resolve(), "")
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert package_root(inner / "a.py") == (tmp_path.resolve(), "kit.ops")

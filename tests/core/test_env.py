import pytest

from nearlight.core import env
from nearlight.core.errors import BadInput


def test_defaults_and_values_are_typed(monkeypatch, tmp_path):
    monkeypatch.delenv("NEARLIGHT", raising=False)
    assert env.read("NEARLIGHT") is True
    monkeypatch.setenv("NEARLIGHT", "off")
    assert env.read("NEARLIGHT") is False
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path))
    assert env.read("NEARLIGHT_CACHE") == tmp_path
    monkeypatch.delenv("NEARLIGHT_CACHE")
    assert env.read("NEARLIGHT_CACHE").name == "nearlight"


def test_a_wrong_value_says_what_is_allowed(monkeypatch):
    monkeypatch.setenv("NEARLIGHT_BACKEND", "cuda")
    with pytest.raises(BadInput, match="NEARLIGHT_BACKEND='cuda': allowed are auto, triton"):
        env.read("NEARLIGHT_BACKEND")


def test_a_cache_that_is_a_file_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(file))
    with pytest.raises(BadInput, match=r"NEARLIGHT_CACHE=.*this is a file; name a folder"):
        env.read("NEARLIGHT_CACHE")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "not" / "yet"))
    assert env.read("NEARLIGHT_CACHE") == tmp_path / "not" / "yet"


def test_every_variable_has_a_reason_and_a_default_that_parses(monkeypatch):
    for name, variable in env.VARIABLES.items():
        monkeypatch.delenv(name, raising=False)
        assert variable.reason
        env.read(name)

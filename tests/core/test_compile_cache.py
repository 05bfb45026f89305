import warnings

import pytest

from nearlight.core import compile_cache


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "cache"))
    compile_cache._warn.cache_clear()
    yield tmp_path / "cache"
    compile_cache._warn.cache_clear()


def test_an_entry_comes_back_as_it_was_stored(cache):
    entry = compile_cache.entry_of("cuda", "a.cubin")
    assert entry == cache / "cuda" / "a.cubin"
    assert compile_cache.load(entry) is None
    for content in (b"\x7fELF\n\0\xff", b""):
        compile_cache.store(entry, content)
        assert compile_cache.load(entry) == content
    assert list(entry.parent.iterdir()) == [entry]


def test_every_damage_makes_an_entry_absent():
    entry = compile_cache.entry_of("triton", "a.json")
    compile_cache.store(entry, b"content")
    whole = entry.read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), 3)]
    for damaged in [*flipped, whole[:-1], whole + b"x", b"", b"\n", b"{}", b"null", b"k\0log\0"]:
        entry.write_bytes(damaged)
        assert compile_cache.load(entry) is None, damaged
    other = entry.with_name("b.json")  # an entry under another key's name is not that key's
    other.write_bytes(whole)
    assert compile_cache.load(other) is None
    entry.unlink()
    entry.mkdir()
    assert compile_cache.load(entry) is None


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file" / "cache"))
    entry = compile_cache.entry_of("cuda", "a.cubin")
    with pytest.warns(UserWarning, match="not kept: .*cuda: Not a directory; .*NEARLIGHT_CACHE"):
        compile_cache.store(entry, b"code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_cache.store(entry, b"code")
    assert compile_cache.load(entry) is None

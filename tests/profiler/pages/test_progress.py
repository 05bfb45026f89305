import re

import pytest

from nearlight.profiler.pages import progress as module
from nearlight.profiler.pages.progress import progress


def test_lines_go_to_stderr_with_the_seconds(capsys, monkeypatch):
    clock = iter([100.0, 100.4, 112.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with progress() as say:
        say("tracing")
        say("proving [layer 1]")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[   0 s] tracing\n[  12 s] proving [layer 1]\n"


def test_quiet_says_nothing(capsys):
    with progress(is_quiet=True) as say:
        say("tracing")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_the_same_lines_unread_as_markup(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as say:
        say("proving [red]layer[/red]")
    out, err = capsys.readouterr()
    assert out == ""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert re.search(r"\[   \d s\] proving \[red\]layer\[/red\]", plain)


def test_an_error_inside_comes_through(capsys):
    with pytest.raises(ValueError, match="inside"), progress() as say:
        say("tracing")
        raise ValueError("inside")
    assert "tracing" in capsys.readouterr().err

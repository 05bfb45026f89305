"""The page `docs/own_kernel.md`: what begins with `$` runs, and prints what is shown."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from nearlight.core.report import Report
from nearlight.profiler.pages.terminal import draw

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_kernel.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def blocks(first, last):
    """Return (language, text) of each block from one heading on, up to another."""
    part = PAGE[PAGE.index(f"## {first}") : PAGE.index(f"## {last}")]
    return re.findall(r"^```(\w*)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)


def flat(text):
    """Return a text without the widths of tables, the breaks of lines and the seconds."""
    text = re.sub(r"(passed|failed|not applicable)( +\d+) +[\d.]+ ", r"\1\2 - ", text)
    return " ".join(re.sub("─+", "─", text).split())


def assert_shown(shown, printed):
    """Hold what a page shows, with … where lines are left out, to what was printed."""
    rest = flat(printed)
    for part in filter(None, map(flat, re.split(r"^\s*…$", shown, flags=re.MULTILINE))):
        _, found, rest = rest.partition(part)
        assert found, f"not printed: {part}\n{printed}"


class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    def __init__(self, folder):
        self.top = self.folder = folder

    def run(self, command):
        if command.startswith("cd "):
            self.folder = (self.folder / command[3:]).resolve()
            return ""
        environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "300"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environ, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == ("failed" in done.stdout), done.stdout + done.stderr
        return done.stdout.replace(f"{self.folder}/", "")

    def console(self, text):
        """Run each command of a block and hold what it prints to what is shown below it."""
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE):
            printed = self.run(command)
            assert_shown(shown, printed)
        return printed

    def edit(self, text):
        """Put each line in the place of the line of the op that is most like it."""
        file = self.folder / "gain.py"
        lines = file.read_text().splitlines()
        for line in text.splitlines():
            (old,) = difflib.get_close_matches(line, lines, 1)
            lines[lines.index(old)] = line
        file.write_text("\n".join((*lines, "")))


@pytest.mark.slow
def test_the_way_in_triton(tmp_path):
    reader, printed = Reader(tmp_path), ""
    for language, text in blocks("Write an op", "In CUDA C++"):
        if language == "python":
            reader.edit(text)
            continue
        if "reproduce" in printed:
            line = next(line for line in printed.splitlines() if line.startswith("import torch"))
            assert "gain: values holds on this input" in reader.run(f'python -c "{line}"')
        printed = reader.console(text)
    assert "gain: values holds on this input" in PAGE and "11 of 11" in printed


@pytest.mark.slow
def test_the_way_in_cuda_and_the_machine_code_of_both(tmp_path):
    reader = Reader(tmp_path)
    reader.run("nearlight new gain --lang triton")
    for language, text in blocks("Write an op", "In CUDA C++"):
        if language == "python":
            reader.edit(text)
    for _, text in blocks("In CUDA C++", "Time and tune it"):
        file = reader.folder / "gain.cu"
        sound = file.read_text() if file.exists() else ""
        if "broken" in text:
            file.write_text(sound.replace("long long", "int"))
        reader.console(text)
        if sound:
            file.write_text(sound)


def test_what_needs_a_gpu_is_drawn_from_the_committed_result():
    (shown,) = (text for _, text in blocks("Time and tune it", "In your tests") if "H200" in text)
    file = ROOT / "nearlight" / "data" / "results" / "h200" / "bench-swiglu.json"
    kept = json.loads(file.read_text())
    names = ("verb", "answer", "gpu", "setup", "rows", "next")
    console = Console(width=300, record=True, file=StringIO())
    draw(Report(**{name: kept[name] for name in names}), console)
    assert_shown(shown, console.export_text())


def test_a_page_that_shows_something_else_is_noticed():
    printed = " a  passed  3       0.1  fine\n ──────\n b  12\n"
    assert_shown("a passed 3 0.25 fine\n…\nb  12\n", printed)
    for stale in ("a passed 4 0.1 fine\n", "b  13\n", "b 12\n…\na  passed  3 0.1 fine\n"):
        with pytest.raises(AssertionError, match="not printed"):
            assert_shown(stale, printed)

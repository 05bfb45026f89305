"""The pages say what is there: links, names, commands with their options, files, exit codes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import typer

import nearlight
from nearlight import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEWS = sorted((ROOT / "changelog.d").iterdir())
RESULTS = ROOT / "nearlight" / "data" / "results" / "h200"
VERBS = typer.main.get_command(cli.app).commands
pages = pytest.mark.parametrize("page", [*PAGES, *NEWS], ids=lambda page: page.name)


def code(text):
    """Return what stands in backticks and blocks, without comments."""
    found = re.findall(r"```\w*\n(.*?)```|`([^`\n]+(?:\n[^`\n]+)?)`", text, re.DOTALL)
    return [re.sub(r"\s#.*", "", block or span) for block, span in found]


def commands(text):
    """Return the words of each `nearlight VERB ...`, a line of a block or a span."""
    lines = [line for part in code(text) for line in part.replace("\\\n", " ").splitlines()]
    return [line.split("nearlight ", 1)[1].split() for line in lines
            if re.match(r"(\$ )?(\.venv/bin/)?nearlight [a-z]", line.strip())]  # fmt: skip


def missing_links(page, text):
    # News becomes part of a changelog beside the README.
    folder = ROOT if page in NEWS else page.parent
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if not (folder / link.partition("#")[0]).exists()]


def missing_names(text):
    missing = []
    for dotted in {
        name for part in code(text) for name in re.findall(r"\bnearlight(?:\.\w+)+", part)
    }:
        home = nearlight
        for depth, name in enumerate(dotted.split(".")[1:], 2):
            if not hasattr(home, name):
                try:
                    importlib.import_module(".".join(dotted.split(".")[:depth]))
                except ModuleNotFoundError:
                    missing.append(dotted)
                    break
            home = getattr(home, name)
    return missing


def wrong_commands(text):
    wrong = []
    for verb, *words in commands(text):
        known = (
            {name for param in VERBS[verb].params for name in param.opts} if verb in VERBS else {}
        )
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        if verb not in VERBS or options - known - {"--help"}:
            wrong.append(" ".join((verb, *words)))
    return wrong


def missing_files(text):
    path = re.compile(r"(?<![.\w])(?:\w+/)+(?:[\w-]+(?:\.\w+)?)?")
    found = [name for part in code(text) for name in path.findall(part)]
    homes = (ROOT, ROOT / "nearlight", ROOT / "nearlight" / "ops")
    places = {name: [home / (name + end) for home in homes for end in ("", ".py")] for name in found
              if name.split("/")[0] in ROOMS}  # fmt: skip
    return [name for name, paths in places.items() if not any(path.exists() for path in paths)]


ROOMS = {path.name for home in (ROOT, ROOT / "nearlight") for path in home.iterdir()} - {"out"}


@pages
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert missing_links(page, text) == []
    assert missing_names(text) == []
    assert wrong_commands(text) == []
    assert missing_files(text) == []


def test_what_is_not_there_is_found():
    text = (
        "[a](gone.md) `nearlight.optimise(model)` `core/gone.py` `nearlight chek`\n"
        "```\n$ nearlight check gain.py --fast\nnearlight check gain.py --quick\n```"
    )
    assert missing_links(PAGES[0], text) == ["gone.md"]
    assert missing_names(text) == ["nearlight.optimise"]
    assert wrong_commands(text) == ["chek", "check gain.py --fast"]
    assert missing_files(text) == ["core/gone.py"]


def figures_of(name, case, direction):
    """Return the cells of an op's row in `docs/results.md`, as its committed result has them."""
    kept = json.loads((RESULTS / f"bench-{name}.json").read_text(encoding="utf-8"))["rows"]
    way = direction.replace(" + ", "_")
    rows = [row for row in kept if (row["case"], row["direction"]) == (case, way)]
    by_peer = {row["implementation"]: row for row in rows}
    ours = by_peer["nearlight"]
    # A peer that lacks the op has no row, or no time.
    found = (by_peer.get(peer, {}).get("ratio") for peer in ("torch", "compile", "liger"))
    ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in found]
    error = f"{ours['prediction_error']:+.0%}"
    return [f"{ours['time_us']:.1f}", f"{ours['share']:.2f}", f"{ours['of_copy']:.2f}",
            *ratios, error]  # fmt: skip


def test_every_figure_of_the_ops_is_in_a_committed_result():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    rows = [row for row in rows if len(row) == 11 and row[2].startswith("forward")]
    results = (ROOT / "nearlight" / "data" / "results" / "h200").glob("bench-*.json")
    assert {row[0] for row in rows} == {path.stem.removeprefix("bench-") for path in results}
    for name, case, direction, *shown, _other_run, error in rows:
        kept = figures_of(name, case, direction)
        if name == "linear_cross_entropy":  # bound by flops: a copy says nothing of it
            kept[2] = ""
        assert [*shown, error] == kept, (name, case, direction)


def test_the_readme_tells_of_every_verb():
    told = {verb for verb, *_ in commands(PAGES[0].read_text(encoding="utf-8"))}
    assert told == set(VERBS)

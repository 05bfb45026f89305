import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import nearlight
from nearlight.core.report import Report
from nearlight.profiler.pages.ratios import by_case
from nearlight.profiler.pages.terminal import draw

RESULTS = Path(nearlight.__file__).parent / "data" / "results" / "h200"
NAMES = sorted(path.stem for path in RESULTS.glob("bench-*.json"))


def drawn(verb, rows, width=80):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    draw(Report(verb, "answer", rows=rows), console)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()][1:]


def row(name, **others):
    return {"case": "8x8", "direction": "forward", "implementation": name, "check": ""} | others


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_of_ours_is_one_whole_line_per_case_on_80_columns(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    lines = drawn("bench", rows)
    cases = {(row["case"], row["direction"]) for row in rows}
    assert not any("…" in line for line in lines)
    if max(len(case) for case, _ in cases) > 30:  # too long for 80 columns: it stands last, wrapped
        assert all(any(case.split()[0] in line for line in lines) for case, _ in cases)
        return
    # The header, its rule, and one for each; then what went wrong.
    for line, key in zip(lines[2 : 2 + len(cases)], dict.fromkeys(by_case_keys(rows)), strict=True):
        assert line.strip().startswith(key[0])
        timed = [row for row in rows if (row["case"], row["direction"]) == key]
        peers = {row["implementation"] for row in timed if row.keys() & {"ratio", "host_us"}}
        assert len(re.findall(r"\d\.\d\d\b", line)) == len(peers & {"torch", "compile", "liger"})


def by_case_keys(rows):
    return [(row["case"], row["direction"]) for row in rows]


def test_ratios_are_peers_over_ours_and_a_wrong_peer_is_marked():
    (found,) = by_case(
        [
            row("nearlight", time_us=12.34, share=0.5),
            row("torch", time_us=25.0, ratio=2.03),
            row("liger", time_us=20.0, ratio=1.62, check="wrong: output"),
            row("quack", check="not installed"),
            row("copy", time_us=10.0),
        ]
    )
    assert found == {
        "case": "8x8",
        "": "fwd",
        "µs": "12.3",
        "share": "50%",
        "× torch": "2.03",
        "× liger": "1.62!",
        "× quack": "–",
    }


def test_where_ours_is_wrong_no_speed_and_no_ratio_is_drawn():
    (found,) = by_case([row("nearlight", check="wrong: y"), row("torch", time_us=25.0)])
    assert (found["µs"], found["× torch"]) == ("none", "–")


def test_host_costs_are_rows_like_others():
    (found,) = by_case([row("nearlight", host_us=60.0), row("torch", host_us=15.0)])
    assert (found["µs"], found["× torch"]) == ("60.0", "0.25")


def test_the_reason_of_a_check_is_the_wide_last_column():
    reason = "on rows 6 × N 67 in float16; rows 4 × N 127 in float32; rows 4 × N 127 in bfloat16"
    rows = [
        {"number": 1, "property": "values", "status": "passed", "num_trials": 77, "reason": ""},
        {"number": 4, "property": "machine code", "status": "not applicable", "num_trials": 0,
         "reason": reason, "seconds": 1.5},
    ]  # fmt: skip
    lines = drawn("check", rows)
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        "#", "property", "status", "trials", "seconds", "reason",
    ]  # fmt: skip
    assert lines[2].split() == ["1", "values", "passed", "77"]
    assert len(lines) <= 7  # the reason is broken between words, into few lines
    assert " ".join(" ".join(lines[3:]).split()).endswith("127 in bfloat16")
    assert "reason" not in drawn("check", rows[:1])[0]  # an empty column is none
    head = drawn("check", [{**rows[1], "reason": "as values"}])[0]
    assert head.split()[-2:] == ["seconds", "reason"]  # wherever the reasons are short

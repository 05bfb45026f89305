"""`bench --diff`: what is a loss, what is said, what is refused; and the exit codes of `bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearlight import cli
from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu
from nearlight.workbench import bench as bench_module
from nearlight.workbench.bench_diff import diff, parse_loss
from nearlight.workbench.bench_report import report_of
from nearlight.workbench.load import load_op


def timed(case: str, time_us: float, spread_us: float = 1.0, **others):
    row = {"case": case, "direction": "forward", "implementation": "nearlight", "check": "held"}
    times = {"time_us": time_us, "low_us": time_us - spread_us, "high_us": time_us + spread_us}
    return row | times | others


def host(host_us: float):
    row = {"case": "host cost, 5x1", "direction": "forward", "implementation": "nearlight"}
    return row | {"check": "", "host_us": host_us}


@pytest.fixture
def saved(tmp_path: Path):
    def save(name: str, *rows, **fields) -> str:
        peer = {**timed("8x8", 5000.0), "implementation": "torch"}
        result = {"verb": "bench", "target": "rms_norm", "gpu": "h200", "rows": [*rows, peer]}
        result |= {"versions": {"torch": "2.11", "triton": "3.6.0"}} | fields
        (tmp_path / name).write_text(json.dumps(result))
        return str(tmp_path / name)

    return save


def test_a_row_is_lost_beyond_the_loss_and_both_spreads(saved):
    a = saved("a", timed("8x8", 100), timed("9x9", 100, 5), timed("10x10", 100), host(50))
    b = saved("b", timed("8x8", 104), timed("9x9", 104, 5), timed("10x10", 101), host(500))
    report = diff(a, b, "2%")
    assert report.answer == ("rms_norm: 1 of 4 rows are slower by more than 2%: 8x8 forward 1.04 ×")
    verdicts = {row["case"]: row["b_is"] for row in report.rows}
    assert verdicts == {
        "8x8": "slower",
        "9x9": "no difference",
        "10x10": "no difference",
        "host cost, 5x1": "not judged",
    }
    assert report.proof is not None and not report.proof.passed
    within = diff(a, b, 0.05)
    assert within.proof is not None and within.proof.passed
    assert within.answer == "rms_norm: 0 of 4 rows are slower by more than 5%"


def test_without_a_loss_it_only_shows(saved):
    a, b = saved("a", timed("8x8", 100)), saved("b", timed("8x8", 90))
    report = diff(a, b)
    assert report.proof is None
    assert report.answer == "rms_norm: 0 of 1 rows are slower, median B ÷ A 0.900"
    assert report.rows[0]["b_is"] == "faster"


def test_a_speed_that_is_gone_is_a_loss(saved):
    wrong = timed("8x8", 1)
    for name in ("time_us", "low_us", "high_us"):
        del wrong[name]
    report = diff(saved("a", timed("8x8", 100)), saved("b", wrong | {"check": "wrong: y"}), "2%")
    assert report.proof is not None and not report.proof.passed
    assert report.answer.endswith("8x8 forward has no speed (wrong: y)")


def test_rows_of_one_file_and_other_versions_are_said(saved):
    a = saved("a", timed("8x8", 100), timed("old", 1))
    b = saved("b", timed("8x8", 100), timed("new", 1), versions={"torch": "2.13"})
    report = diff(a, b)
    assert report.answer.endswith("; 1 only in A; 1 only in B")
    assert "torch 2.11 → 2.13, triton 3.6.0 → None" in report.setup


def test_what_cannot_be_compared_is_bad_input(saved, tmp_path: Path):
    a = saved("a", timed("8x8", 100))
    with pytest.raises(BadInput, match="gpu h200 and .* of b200"):
        diff(a, saved("b", timed("8x8", 100), gpu="b200"))
    with pytest.raises(BadInput, match="target rms_norm and .* of rope"):
        diff(a, saved("b", timed("8x8", 100), target="rope"))
    with pytest.raises(BadInput, match="no case and direction in common"):
        diff(a, saved("b", timed("9x9", 100)))
    with pytest.raises(BadInput, match="no result of `nearlight bench"):
        diff(a, saved("b", verb="check", rows=[]))
    (tmp_path / "broken").write_text("{")
    for name in ("absent", "broken"):
        with pytest.raises(BadInput, match="cannot be read as JSON"):
            diff(a, tmp_path / name)


def test_a_loss_is_a_share():
    assert parse_loss("2%") == parse_loss("0.02") == parse_loss(0.02) == 0.02
    assert parse_loss("0%") == 0
    for text in ("2", "-1%", "100%", "two", "nan", "%", ""):
        with pytest.raises(BadInput, match="allowed are 2% or 0.02"):
            parse_loss(text)


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["nearlight", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_exit_codes(saved, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    a, b = saved("a", timed("8x8", 100)), saved("b", timed("8x8", 110))
    assert exit_code(monkeypatch, "--diff", a, b, "--max-loss", "2%") == 1
    assert capsys.readouterr().out.startswith("rms_norm: 1 of 1 rows are slower by more than 2%")
    assert exit_code(monkeypatch, "--diff", a, b, "--max-loss", "20%") == 0
    assert exit_code(monkeypatch, "--diff", a, b) == 0
    capsys.readouterr()
    for bad in (
        [],
        ["rms_norm", "--diff", a, b],
        ["rms_norm", "--max-loss", "2%"],
        ["--diff", a, b, "--vs", "quack"],
        ["--diff", a, b, "--max-loss", "much"],
    ):
        assert exit_code(monkeypatch, *bad) == 2, bad
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_wrong_op_is_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = {"case": "8x8", "direction": "forward", "implementation": "nearlight"}

    def ran(op, **_):
        return report_of(load_op("rms_norm"), find_gpu("h200"), rows, {})

    monkeypatch.setattr(bench_module, "bench", ran)
    rows = [row | {"check": "wrong: output: 3 of 64 elements are NaN"}]
    assert exit_code(monkeypatch, "rms_norm") == 1
    assert "1 of 1 without a speed: wrong: output" in capsys.readouterr().out
    rows = [row | {"check": "held", "time_us": 2.0, "share": 0.5}]
    assert exit_code(monkeypatch, "rms_norm") == 0

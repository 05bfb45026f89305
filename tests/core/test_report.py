import json
import os

import pytest

from nearlight.core.errors import BadInput
from nearlight.core.report import (
    Figure,
    Finding,
    OpRow,
    Proof,
    Report,
    State,
    gib,
    require_writable,
    write_aside,
)

ROW = OpRow("aten::mm", "model.layers.0.mlp", 3, 2.0, 1.5, 0.75, "compute", 10, 20)


def state(mode, step_ms):
    return State(
        mode=mode,
        step_ms=step_ms,
        tokens_per_s=100.0,
        samples_per_s=1.0,
        peak_bytes=1024,
        limit_ms=1.0,
        share=1.0 / step_ms,
        ops=[ROW],
        figures={"step_ms": Figure(step_ms, "ms", mode, "test", 0.9 * step_ms, 1.1 * step_ms)},
    )


def test_json_holds_the_contract():
    finding = Finding("t", "e", "c", "patch:rms_norm", 1.5, 10, applied=True)
    report = Report(
        "optimize",
        "answer",
        before=state("predicted", 4.0),
        after=state("predicted", 2.0),
        findings=[finding],
        proof=Proof(True, [{"name": "loss", "passed": True}]),
    )
    data = json.loads(report.to_json())
    assert data["schema"] == 1
    assert data["mode"] == "predicted"
    assert data["before"]["step_ms"] == 4.0 and data["after"]["step_ms"] == 2.0
    assert data["after"]["ops"][0]["share"] == 0.75
    assert data["after"]["figures"]["step_ms"] == {
        "value": 2.0,
        "unit": "ms",
        "kind": "predicted",
        "source": "test",
        "low": 1.8,
        "high": 2.2,
    }
    assert data["findings"][0]["gain_ms"] == 1.5 and data["findings"][0]["applied"] is True
    assert data["proof"]["passed"] is True


def test_top_level_mode_is_afters():
    report = Report("optimize", "", before=state("predicted", 2.0), after=state("measured", 1.0))
    assert report.to_dict()["mode"] == "measured"
    assert Report("predict", "", before=state("predicted", 2.0)).mode == "predicted"
    assert Report("doctor", "").mode is None


def test_a_figure_lies_inside_its_interval():
    with pytest.raises(ValueError, match="outside"):
        Figure(2.0, "ms", "predicted", "x", low=0.5, high=1.5)
    with pytest.raises(ValueError, match="both ends"):
        Figure(2.0, "ms", "predicted", "x", low=0.5)


def test_nan_is_refused_rather_than_written_as_broken_json():
    with pytest.raises(ValueError):
        Report("predict", "", before=state("predicted", float("nan"))).to_json()


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    target = tmp_path / "sub" / "report.json"
    write_aside(target, "old")
    monkeypatch.setattr(os, "fdopen", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_aside(target, "new")
    assert [p.name for p in target.parent.iterdir()] == ["report.json"]
    assert target.read_text() == "old"


def test_bytes_are_written_as_they_are(tmp_path):
    write_aside(tmp_path / "b", b"\0\xff")
    assert (tmp_path / "b").read_bytes() == b"\0\xff"
    write_aside(tmp_path / "t", "× µs\n")
    assert (tmp_path / "t").read_bytes() == "× µs\n".encode()


def test_a_writable_place_is_left_as_it_was(tmp_path):
    require_writable(tmp_path / "new" / "folders" / "report.json")
    (tmp_path / "old.json").write_text("old")
    require_writable(tmp_path / "old.json")
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a folder"):
        require_writable(tmp_path)
    with pytest.raises(BadInput, match="cannot be written"):
        require_writable(tmp_path / "file" / "report.json")
    with pytest.raises(BadInput, match="cannot be written"):
        require_writable("/proc/nearlight/report.json")  # not even by root
    with pytest.raises(BadInput, match=f"there is no folder {tmp_path}/new; make it first"):
        require_writable(tmp_path / "new" / "report.json", makes_folders=False)
    require_writable(tmp_path / "report.json", makes_folders=False)
    with pytest.raises(BadInput, match="no ordinary file"):
        require_writable("/dev/null")  # it would be replaced


def test_bytes_as_text():
    assert [gib(n) for n in (0, 2**20, 2**30 - 1, 2**30, 3 * 2**29, -(2**31))] == [
        "0 MiB", "1 MiB", "1024 MiB", "1.00 GiB", "1.50 GiB", "-2.00 GiB",
    ]  # fmt: skip


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_aside(link, "new")
    assert link.is_symlink() and real.read_text() == "new"


def test_a_pipe_is_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no ordinary file"):
        write_aside(pipe, "text")
    assert pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_report_prints_as_text_a_newcomer_can_read():
    finding = Finding("12 norms", "12 calls", "c", "patch:rms_norm", 1.5, 10, True, "saved 2 ms")
    report = Report("optimize", "a on h200", setup="bf16", findings=[finding], next="next: patch")
    assert str(report).splitlines() == [
        "a on h200", "bf16", "1. 12 norms (applied): 12 calls", "   saved 2 ms", "next: patch",
    ]  # fmt: skip
    assert repr(report) == "Report(optimize: a on h200)"

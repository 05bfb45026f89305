import json
import os

import pytest

from nearlight.core.report import Figure, Finding, OpRow, Proof, Report, State, write_aside

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

"""The command line: exit codes, one-line errors, nothing half-written, first and last lines."""

import json
import subprocess
import sys
import time

import pytest

from nearlight import cli

TINY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2)

def program():
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(0))
    return LlamaForCausalLM(LlamaConfig(**CONFIG)), {"input_ids": ids, "labels": ids}

def plain():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.randn(4, 8), lambda model, batch: model(batch["input"]).square().mean()

def wrong():
    return 3
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "tiny.py"
    path.write_text(TINY)
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["nearlight", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_bare_nearlight_prints_the_four_doors(run):
    code, out, _ = run()
    assert code == 0
    for door in ("too slow", "does not fit", "my own kernel", "I want to learn"):
        assert door in out


def test_version_is_fast_and_loads_no_torch():
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nearlight", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("nearlight 0.")
    assert "| torch\n" not in done.stderr
    assert time.perf_counter() - start < 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "smolm2-135m"], "smollm2-135m"),
        (["optimize", "smollm2-135m", "--gpu", "h2000"], "h200"),
        (["predict", "gpt2", "--gpu", "h200,abc"], "abc"),
        (["optimize", "gpt2", "--batch", "0"], "at least 1"),
        (["optimize", "gpt2", "--seq", "4096"], "1024"),
        (["optimize", "gpt2", "--task", "dance"], "train, prefill, decode"),
        (["optimize", "gpt2", "--dtype", "fp7"], "bf16, fp16, fp32"),
        (["optimize", "."], "config.json"),
        (["optimize", "missing.py:program"], "missing.py"),
        (["check", "rms_nrom"], "rms_norm"),
        (["calibrate"], "GPU"),
        (["bench", "rms_norm"], "GPU"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2, err
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert message in err
    assert "Traceback" not in err


def test_a_function_that_returns_the_wrong_thing(run, program, tmp_path):
    page = tmp_path / "report.html"
    code, _, err = run("optimize", f"{program}:wrong", "--html", page)
    assert code == 2
    assert "(model, batch)" in err
    assert list(tmp_path.iterdir()) == []
    code, _, err = run("optimize", f"{program}:nothing")
    assert code == 2 and "nothing" in err
    code, _, err = run("optimize", f"{program}:program", "--batch", 4)
    assert code == 2 and "--batch" in err


def test_a_report_path_that_is_a_folder_is_refused_before_the_work(run, program, tmp_path):
    code, _, err = run("optimize", f"{program}:program", "--json", tmp_path)
    assert code == 2
    assert "is a folder" in err


@pytest.mark.slow
def test_optimize_reports_before_after_findings_and_a_proof(run, program, tmp_path):
    report, page = tmp_path / "out" / "report.json", tmp_path / "out" / "report.html"
    code, out, _ = run(
        "optimize", f"{program}:program", "--gpu", "h200", "--json", report, "--html", page
    )
    assert code == 0, out
    lines = out.strip().splitlines()
    assert "ms a step" in lines[0]
    assert lines[-1].startswith("next:")
    data = json.loads(report.read_text())
    assert data["mode"] == "predicted" and data["gpu"] == "h200"
    assert data["proof"]["passed"] is True
    # The loss over 128 classes is too small to be worth a fix.
    applied = {finding["fix"] for finding in data["findings"] if finding["applied"]}
    assert applied == {"patch:rms_norm", "patch:swiglu", "patch:rope"}
    assert data["after"]["limit_ms"] == data["before"]["limit_ms"]
    assert data["after"]["step_ms"] >= data["after"]["limit_ms"]
    assert page.stat().st_size < 500_000
    assert sorted(p.name for p in page.parent.iterdir()) == ["report.html", "report.json"]


def test_a_model_no_row_fits_gets_findings_and_exit_0(run, program):
    code, out, _ = run("optimize", f"{program}:plain", "--gpu", "h200", "--json", "-")
    assert code == 0
    data = json.loads(out)
    assert data["proof"] is None
    assert not any(finding["applied"] for finding in data["findings"])


def test_predict_compares_gpus(run):
    code, out, _ = run(
        "predict", "gpt2", "--gpu", "h200,a100-80gb", "--batch", 2, "--seq", 128, "--json", "-"
    )
    assert code == 0
    rows = {row["gpu"]: row for row in json.loads(out)["rows"]}
    assert rows.keys() == {"h200", "a100-80gb"}


def test_doctor_and_ops_answer(run):
    code, out, _ = run("doctor")
    assert code == 0 and out.startswith("nearlight on this machine")
    code, out, _ = run("ops", "--json", "-")
    assert code == 0
    assert "rms_norm" in {row["op"] for row in json.loads(out)["rows"]}

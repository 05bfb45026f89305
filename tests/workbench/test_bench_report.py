from nearlight.core.hardware import find_gpu
from nearlight.workbench.bench_report import report_of
from nearlight.workbench.load import load_op


def test_the_answer_counts_what_was_lost():
    rows = [
        {"implementation": "nearlight", "share": 0.5, "check": ""},
        {"implementation": "nearlight", "check": "wrong: output"},
        {"implementation": "torch", "ratio": 0.8, "check": ""},
        {"implementation": "torch", "ratio": 2.0, "check": ""},
    ]
    report = report_of(load_op("rms_norm"), find_gpu("h200"), rows, {})
    assert "share of the limit 0.50 to 0.50" in report.answer
    assert "1.40 × torch (slower in 1)" in report.answer
    assert "1 of 2 without a speed: wrong: output" in report.answer
    assert report.proof is not None and not report.proof.passed
    assert report.next == "next: nearlight check rms_norm"

"""What the search of a launch came to, as a row of the table, of the file, and in one answer."""

from dataclasses import dataclass

import torch

from nearlight import ops
from nearlight.core.hardware import find_gpu
from nearlight.core.op import Case
from nearlight.core.timing import Timing
from nearlight.core.tuned import Asked, Choice
from nearlight.workbench.tune_report import Found, report_of

H200 = find_gpu("h200")
CASE = Case("6x40", {"rows": 6, "columns": 40}, torch.float32)


@dataclass(frozen=True)
class Config:
    block: int
    num_warps: int = 4


CHOICE = Choice("rms_norm", lambda shape, gpu: Config(4), lambda shape, gpu: {})
ASKED = Asked(CHOICE, {"shape": (6, 40), "gpu": H200})


def found(fault="", dropped=None, **times_us):
    timings = {
        Config(int(name[1:])): Timing(us, us - 1, us + 1, (us,) * 20, "events")
        for name, us in sorted(times_us.items(), key=lambda item: item[1])
    }
    num_timed = len(timings)
    return Found(ASKED, CASE, "forward", Config(4), timings, dropped or {}, num_timed, fault)


def test_a_row_of_the_table():
    dropped = {
        Config(8): "too wide",
        Config(16): "too wide",
        Config(2): "wrong: output: whole 2 > 1e-7",
    }
    assert found(_1=10.0, _4=12.0, dropped=dropped).drawn() == {
        "launch": "<lambda> (6, 40)",
        "direction": "forward",
        "config": "block=1 num_warps=4",
        "time_us": 10.0,
        "low_us": 9.0,
        "high_us": 11.0,
        "rule_us": 12.0,
        "rule_loss": 0.19999999999999996,
        "next_us": 12.0,
        "timed": 2,
        "dropped": 3,
        "remark": "the rule is too slow here; block=2 num_warps=4 wrong: output: whole 2 > 1e-7",
    }


def test_a_row_of_the_file_names_all_that_was_dropped():
    saved = found(_4=10.0, _1=12.0, dropped={Config(8): "too wide"}).saved()
    assert saved["rule_is_best"] and saved["config"] == {"block": 4, "num_warps": 4}
    assert (saved["next_best"], saved["next_us"]) == ({"block": 1, "num_warps": 4}, 12.0)
    assert saved["dropped"] == {"block=8 num_warps=4": "too wide"}
    assert "next_us" not in found(_4=10.0).saved()


def test_a_fault_has_no_numbers():
    row = found(fault="the rule's launch: RuntimeError: no").drawn()
    assert row["remark"] == "the rule's launch: RuntimeError: no" and "time_us" not in row


def test_the_answer_counts_and_the_proof_holds_the_rule_to_its_loss():
    near, best = found(_1=9.8, _4=10.0), found(_4=10.0)
    report = report_of(ops.OPS["rms_norm"], H200, [near, best], {})
    assert report.proof.passed
    assert report.answer == (
        "rms_norm on NVIDIA H200: 2 launches, the rule is best in 1 and at most 2.0% slower than "
        "the best"
    )
    assert report.next == "next: nearlight bench rms_norm"
    far, fault = found(_1=9.0, _4=10.0), found(fault="the rule's launch: wrong")
    assert not report_of(ops.OPS["rms_norm"], H200, [best, far], {}).proof.passed
    report = report_of(ops.OPS["rms_norm"], H200, [best, fault], {})
    assert not report.proof.passed and report.answer.endswith(
        "best in 1; 1 without a row: the rule's launch: wrong"
    )

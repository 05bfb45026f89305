"""An op that crashes, hangs, leaves or shouts takes its own process along, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearlight.core.errors import BadInput, MissingPart
from nearlight.workbench import apart
from nearlight.workbench.apart import check_apart
from nearlight.workbench.check import check
from nearlight.workbench.load import load_op

WriteOp = Callable[..., Path]
TWINS = Path(__file__).with_name("twins.py")

ENDINGS = [
    ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV at twice.py:"),
    ("ctypes.string_at(0)", "ended by SIGSEGV at twice.py:"),
    ("os._exit(0)", "ended the process with exit code 0"),
    ("sys.exit(3)", "raised SystemExit: 3"),
]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed process that nobody has waited for yet is dead all the same.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.mark.parametrize(("body", "reason"), ENDINGS)
def test_an_op_that_ends_its_process_fails_with_its_input(
    write_op: WriteOp, body: str, reason: str
):
    file = write_op(body=f"x.shape[0] == 9 and {body}")
    report = check_apart(str(file), only=["values"])
    (row,) = report.rows
    assert row["status"] == "failed" and row["reason"].startswith(reason)
    assert "reproduce('" in row["reproduce"] and "'values', {'rows': 9, " in row["reproduce"]
    assert row["num_trials"] > 1
    assert report.proof is not None and not report.proof.passed
    assert report.answer == "twice: 0 of 1 properties hold; broken: values"
    assert report.next == row["reproduce"]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_what_is_killed_from_outside_is_tried_again_before_it_is_blamed(
    write_op: WriteOp, tmp_path: Path, number: str
):
    kill = f"os.kill(os.getpid(), signal.{number})"
    first = f"x.shape[0] == 9 and not os.path.exists({str(tmp_path / 'was')!r})"
    once = f"{first} and (open({str(tmp_path / 'was')!r}, 'x').close(), {kill})"
    said: list[str] = []
    report = check_apart(str(write_op(body=once)), only=["values"], progress=said.append)
    assert report.proof is not None and report.proof.passed
    assert said[0].endswith(f"values: was killed by {number}, a second attempt")
    (row,) = check_apart(str(write_op(body=f"x.shape[0] == 9 and {kill}")), only=["values"]).rows
    told = f"was killed by {number} in two attempts; that is sent from outside: out of memory?"
    assert (row["status"], row["reason"]) == ("failed", told)
    assert "'values', {'rows': 9, " in row["reproduce"]


def test_an_interrupt_that_the_op_raises_itself_is_the_finding(write_op: WriteOp):
    """No terminal's key reaches the process of a check."""
    (row,) = check_apart(str(write_op(body="raise KeyboardInterrupt")), only=["values"]).rows
    assert row["status"] == "failed"
    assert re.fullmatch(r"raised KeyboardInterrupt at twice\.py:\d+ in twice", row["reason"])
    file = write_op(top="raise KeyboardInterrupt")
    with pytest.raises(BadInput, match=rf"^{file}:\d+: KeyboardInterrupt$"):
        check_apart(str(file), only=["values"])


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(60)"])
def test_an_op_that_hangs_fails_with_its_input(write_op: WriteOp, body: str):
    report = check_apart(str(write_op(body=body)), only=["values"], trial_seconds=3.0)
    (row,) = report.rows
    assert row["status"] == "failed" and row["num_trials"] == 1
    assert row["reason"].startswith("did not finish in 3 s")
    assert "'values', {'rows': 1, 'columns': 1}, torch.float32" in row["reproduce"]


def test_a_loop_in_an_interpreted_kernel_is_ended(tmp_path: Path):
    file = tmp_path / "loops.py"
    text = TWINS.read_text(encoding="utf-8")
    text = text.replace("    x = tl.load(", "    while M > 0:\n        N = N\n    x = tl.load(", 1)
    file.write_text(text, encoding="utf-8")
    (row,) = check_apart(str(file), only=["poison"], trial_seconds=3.0).rows
    assert row["status"] == "failed" and row["reason"].startswith("did not finish in 3 s")


def test_the_other_properties_are_proved_by_the_next_child(write_op: WriteOp):
    file = write_op(body="x.stride() == (5, 1) and x.shape[0] == 9 and os._exit(7)")
    report = check_apart(str(file), only=["values", "layouts", "extremes"])
    status = {row["property"]: row["status"] for row in report.rows}
    assert status == {"values": "failed", "layouts": "passed", "extremes": "passed"}
    assert report.answer == "twice: 2 of 3 properties hold; broken: values"


def test_a_crash_while_a_failure_is_made_smaller_keeps_the_failure(write_op: WriteOp):
    file = write_op(body="if len(x) < 3: os._exit(7)\n    return (2.1 if len(x) == 3 else 2) * x")
    (row,) = check_apart(str(file), only=["values"]).rows
    assert "{'rows': 3, 'columns': 5}" in row["reproduce"] and row["num_trials"] >= 1
    assert row["reason"].startswith("output")
    assert row["reason"].endswith("(a smaller input: ended the process with exit code 7)")


def test_an_input_that_ends_its_process_is_made_smaller(write_op: WriteOp):
    file = write_op(body="x.shape[0] > 8 and os._exit(7)")
    rows = check_apart(str(file), only=["values", "poison"]).rows
    assert "'values', {'rows': 9, 'columns': 1}" in rows[0]["reproduce"]
    assert rows[0]["reason"] == "ended the process with exit code 7"
    assert rows[1]["same_as"] == "values"  # on the same input, which is not run again


@pytest.mark.parametrize(
    ("prop", "rows", "named"),
    [("memory", "1 < len(x) < 4", True), ("memory", "len(x) == 9", False), ("size", "True", False)],
)
def test_a_write_beyond_a_tensor_is_what_ends_a_process_on_the_same_input_alone(
    write_op: WriteOp, prop: str, rows: str, named: bool
):
    """Between guard zones it is taken; where there are none, it may end the process.

    An op that crashes for another reason keeps its own line, as does one whose offsets are too
    large: what lies around a tensor that is spread out takes a write.
    """
    body = (
        "has_zones = x.untyped_storage().nbytes() > x.numel() * x.element_size() + 64\n"
        f"    if has_zones and ({rows}):\n"
        "        ctypes.memset(x.data_ptr() + x.numel() * x.element_size(), 0, 4)\n"
        f"    if 'properties/{prop}.py' in str(__import__('traceback').extract_stack()):\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)"
    )
    report = check_apart(str(write_op(body=body)), only=["poison", prop])
    rows_of = {row["property"]: row for row in report.rows}
    assert rows_of["poison"]["reason"].startswith("wrote right past the end of x")
    assert rows_of[prop]["reason"].startswith("ended by SIGSEGV")
    assert rows_of[prop].get("same_as") == ("poison" if named else None)


def test_a_crash_before_the_first_smaller_input_is_said(write_op: WriteOp, tmp_path: Path):
    seen = tmp_path / "seen"
    body = (
        f"if os.path.exists({str(seen)!r}): os._exit(8)\n"
        f"    if len(x) == 7: open({str(seen)!r}, 'x').close(); os._exit(7)"
    )
    (row,) = check_apart(str(write_op(body=body)), only=["shapes"]).rows
    assert row["reason"] == (
        "ended the process with exit code 7; not made smaller: ended the process with exit code 8 "
        "while inputs were chosen"
    )
    assert "{'rows': 7, " in row["reproduce"]


def test_how_far_an_input_was_made_smaller_is_said(write_op: WriteOp, monkeypatch):
    monkeypatch.setattr(apart, "SMALLER_SECONDS", 0.0)
    (row,) = check_apart(str(write_op(body="x.shape[0] > 4 and os._exit(7)")), only=["values"]).rows
    assert row["reason"].endswith("exit code 7; made smaller for 0 s, not to the end")
    assert "{'rows': 9, 'columns': 5}" in row["reproduce"]


def test_an_op_that_forks_and_comes_back_twice_does_not_multiply(write_op: WriteOp, tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    note = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} {{os.getppid()}}\\n')"
    file = write_op(body=f"os.path.getsize({str(log)!r}) < 9000 and {note} and os.fork()")
    report = check_apart(str(file), only=["values"])
    assert report.proof is not None and report.proof.passed
    calls = [line.split() for line in log.read_text().splitlines()]
    first = calls[0][0]
    assert {parent for pid, parent in calls if pid != first} <= {first}
    assert all(gone(int(pid)) for pid, _ in calls)


def test_a_crash_before_the_first_input_says_so(write_op: WriteOp):
    file = write_op(body="os._exit(4)")
    (row,) = check_apart(str(file), only=["poison"]).rows
    assert row["reason"] == "ended the process with exit code 4 while inputs were chosen"
    assert row["reproduce"].endswith(f"reproduce_property('{file}:OP', 'poison')")


def test_what_an_op_prints_stays_out_of_the_report(write_op: WriteOp, tmp_path: Path):
    file = write_op(body="print('{' * 200_000)")
    command = [sys.executable, "-m", "nearlight", "check", file, "--only", "values", "--json", "-"]
    with (tmp_path / "stderr").open("w") as stderr:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
        )
    assert done.returncode == 0
    assert done.stdout.startswith('{\n "schema"')
    assert "{{{{" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(
    ("planted", "code", "complaint"),
    [
        ({"body": "os.kill(os.getpid(), signal.SIGSEGV)"}, 1, "poison: failed"),
        ({"top": "x = = 3"}, 2, "twice.py:7: SyntaxError"),
    ],
)
def test_the_command_line_tells_a_broken_op_from_a_broken_file(
    write_op: WriteOp, planted: dict[str, str], code: int, complaint: str
):
    command = [sys.executable, "-m", "nearlight", "check", write_op(**planted), "--only", "poison"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert complaint in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ("ended by SIGSEGV" in " ".join(done.stdout.split())) is (code == 1)


def test_the_report_is_that_of_a_check_in_this_process():
    there = check_apart(str(TWINS), quick=True).to_dict()
    here = check(load_op(str(TWINS)), quick=True).to_dict()
    for report in (there, here):
        for row in report["rows"]:
            del row["seconds"]
    assert there.pop("next") == f"nearlight check {TWINS}"
    assert here.pop("next") == f"nearlight check {TWINS}:OP"
    assert there == here


IMPORTS = [
    ("x = = 3", "twice.py:7: SyntaxError"),
    ("undefined", "twice.py:7: NameError: name 'undefined' is not defined"),
    ("os._exit(0)", "ended the process with exit code 0 while it was imported"),
    ("del Op; Op = dict", "has no Op record called OP"),
    (
        "from nearlight.workbench.apart import check_apart; check_apart(__file__)",
        "put the call below `if __name__ == '__main__':`",
    ),
]


@pytest.mark.parametrize(("top", "message"), IMPORTS)
def test_a_file_that_does_not_import_is_bad_input(write_op: WriteOp, top: str, message: str):
    with pytest.raises(BadInput) as caught:
        check_apart(str(write_op(top=top)), quick=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_does_not_finish_importing_is_bad_input(write_op: WriteOp):
    file = write_op(top="time.sleep(60)")
    with pytest.raises(BadInput, match=r"twice\.py: did not finish in 3 s.* while it was imported"):
        check_apart(str(file), start_seconds=3.0)


def test_what_is_wrongly_asked_for_comes_back_as_it_was_raised():
    with pytest.raises(BadInput, match="no property called 'speed'"):
        check_apart("rms_norm", only=["speed"])
    with pytest.raises(MissingPart, match="no GPU that torch sees"):
        check_apart("rms_norm", device="cuda:99")


def test_this_side_loads_neither_torch_nor_the_file(write_op: WriteOp):
    code = (
        "import sys; from nearlight.workbench.apart import check_apart;"
        f"report = check_apart({str(write_op())!r}, only=['poison']);"
        "print(report.proof.passed, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(write_op: WriteOp, tmp_path: Path, ending: signal.Signals):
    told = tmp_path / "pids"
    body = (
        f"p = subprocess.Popen(['sleep', '60']) if not os.path.exists({str(told)!r}) else None; "
        f"open({str(told)!r}, 'x').write(f'{{os.getpid()}} {{p.pid}}\\n'); time.sleep(60)"
    )
    command = [sys.executable, "-m", "nearlight", "check", str(write_op(body=body)), "--quick"]
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not (told.exists() and told.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    child, grandchild = map(int, told.read_text().split())
    parent.send_signal(ending)
    parent.wait(10)
    assert gone(child)
    if ending is not signal.SIGKILL:
        assert gone(grandchild)
    elif is_alive(grandchild):
        os.kill(grandchild, signal.SIGKILL)  # the parent had no say in its own end

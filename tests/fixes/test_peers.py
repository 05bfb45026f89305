import copy
import dataclasses
import sys

import pytest

from nearlight.core.errors import BadInput
from nearlight.core.report import State
from nearlight.fixes import peers
from nearlight.fixes.fix import Fix


def state(step_ms, peak_bytes):
    return State("measured", step_ms, 1.0, 1.0, peak_bytes, 1.0, 1.0)


def test_an_unknown_peer_is_named_with_those_known(make_target):
    with pytest.raises(BadInput, match=r"peer 'linger': allowed are liger"):
        peers.check_peers(["liger", "linger"], make_target())


def test_a_live_model_is_not_given_to_peers(make_target):
    live = dataclasses.replace(make_target(), is_live=True)
    peers.check_peers([], live)
    with pytest.raises(BadInput, match="name a target"):
        peers.check_peers(["liger"], live)


def test_programs_take_turns_and_none_leaves_anything_behind(make_target, monkeypatch):
    """Times of each block are its own; a replaced function stands only in its program's block."""
    target = make_target()
    home = vars(sys.modules[type(target.make_model()).__module__])
    monkeypatch.setitem(home, "kernel", "found")
    log = []

    class OnCpu:
        times_ms = iter([4.0, 5.0, 3.0, 9.0, 5.0, 6.0])

        def __init__(self, target, model, batch):
            log.append((model.name, home["kernel"], home.get("helper"), model.training))

        def block(self, steps):
            return next(self.times_ms), 3 * 2**29

        def release(self):
            log.append("released")

    def other(model):
        home.update(kernel="other", helper="new")
        model.name = "other"

    def ours(model):
        model.name = "ours"

    model, make_batch = target.make_model(), type(target).make_batch
    monkeypatch.setattr(type(target), "make_model", lambda self, device="": copy.deepcopy(model))
    monkeypatch.setattr(type(target), "make_batch", lambda self, device="": make_batch(self, "cpu"))
    monkeypatch.setattr(peers, "Step", OnCpu)
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setitem(peers.PEERS, "other", other)
    rows = peers.step_rows(target, ["other"], [Fix("ours", "exact", ours)], state(8.0, 2**31))
    assert log == 3 * [
        ("ours", "found", None, True), "released", ("other", "other", "new", True), "released"
    ]  # fmt: skip
    assert home["kernel"] == "found" and "helper" not in home
    assert [(r["program"], r["step_ms"], r["peak_gib"], r["ratio"]) for r in rows] == [
        ("as found", 8.0, 2.0, 2.0), ("nearlight", 4.0, 1.5, 1.0), ("other", 6.0, 1.5, 1.5),
    ]  # fmt: skip
    assert rows[1]["tokens_per_s"] == pytest.approx(2 * 24 / 4e-3)

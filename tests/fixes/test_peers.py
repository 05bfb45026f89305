import dataclasses

import pytest
import torch

from nearlight.core.errors import BadInput
from nearlight.core.report import State
from nearlight.fixes import peers


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


def test_every_program_is_a_row_against_ours(make_target, monkeypatch):
    """A fresh model is changed by the peer and measured; nothing of it stays."""
    log = []

    class OnCpu:
        def __init__(self, target, model, batch):
            log.append(model.is_changed)

        def block(self, steps):
            return 5.0, 3 * 2**29

        def release(self):
            log.append("released")

    target = make_target()
    monkeypatch.setattr(
        type(target), "make_batch", lambda self, device="cpu": self.batch_only("cpu")
    )
    monkeypatch.setattr(peers, "Step", OnCpu)
    monkeypatch.setitem(peers.PEERS, "other", lambda model: setattr(model, "is_changed", True))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows = peers.step_rows(target, ["other"], state(8.0, 2**31), state(4.0, 2**30))
    assert log == [True, "released"]
    assert [(r["program"], r["step_ms"], r["peak_gib"], r["ratio"]) for r in rows] == [
        ("as found", 8.0, 2.0, 2.0), ("nearlight", 4.0, 1.0, 1.0), ("other", 5.0, 1.5, 1.25),
    ]  # fmt: skip
    assert rows[1]["tokens_per_s"] == pytest.approx(2 * 24 / 4e-3)

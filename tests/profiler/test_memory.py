import gc

import torch

from nearlight.profiler.attribution import Place
from nearlight.profiler.capture import trace
from nearlight.profiler.memory import OWNERS, Ledger, describe


def test_allocations_are_rounded_and_released():
    ledger = Ledger()
    kept = torch.zeros(1)
    ledger.add(kept, owner="parameters", name="weight")
    ledger.start_step()
    a = torch.zeros(300)  # 1200 bytes → 1536
    ledger.add(a)
    ledger.add(a[10:])  # the same storage
    with ledger.workspace(100, "an::op", Place(), "forward"):
        b = torch.zeros(128)  # 512 bytes
        ledger.add(b)
    del a
    gc.collect()
    timeline = ledger.timeline()
    assert timeline.peak().num_bytes == 512 + 1536 + 512 + 512
    assert [storage.num_bytes for storage in timeline.alive(len(timeline.events) - 1)] == [512, 512]
    alive = timeline.alive(timeline.peak().event)
    assert alive[0].num_bytes == 1536
    assert "workspace of an::op" in {storage.name for storage in alive}


def test_an_empty_tensor_is_no_allocation():
    ledger = Ledger()
    ledger.add(torch.zeros(0))
    assert ledger.timeline().events == ()


def test_owners_add_up_to_the_peak(make_target, llama_1b):
    for step in (trace(make_target()), llama_1b):
        peak = step.timeline.peak()
        owners = step.timeline.by_owner(peak)
        assert set(owners) == set(OWNERS)
        assert sum(owners.values()) == peak.num_bytes
        assert all(size >= 0 for size in owners.values())


def test_owners_of_a_training_step(make_target):
    step = trace(make_target())
    last = step.timeline.by_owner(step.timeline.peak())
    assert last["parameters"] >= step.parameter_bytes
    assert last["optimizer"] >= step.optimizer_bytes
    assert last["inputs"] == 8 * 16 * 64 * 4
    events = range(len(step.timeline.events))
    gradients = [
        sum(s.num_bytes for s in step.timeline.alive(event) if s.owner == "gradients")
        for event in events
    ]
    assert max(gradients) >= step.gradient_bytes
    assert gradients[-1] == 0  # zero_grad(set_to_none=True)


def test_the_peak_without_some_tensors(llama_1b):
    timeline = llama_1b.timeline
    peak = timeline.peak().num_bytes
    assert timeline.peak(without=lambda storage: False).num_bytes == peak
    without = timeline.peak(without=lambda s: s.owner == "parameters").num_bytes
    assert without == peak - timeline.by_owner(timeline.peak())["parameters"]
    assert timeline.peak(without=lambda storage: True).num_bytes == 0


def test_the_peak_of_llama_1b_is_made_by_its_loss(llama_1b):
    timeline = llama_1b.timeline
    rows = describe(timeline.alive(timeline.peak().event), 3)
    assert [row["name"] for row in rows] == [
        "aten::_log_softmax",
        "aten::nll_loss_backward",
        "aten::_log_softmax_backward_data",
    ]
    assert {row["bytes"] for row in rows} == {32768 * 128256 * 4}
    assert all(row["module"] == "LlamaForCausalLM" for row in rows)
    assert rows[0]["dtype"] == "float32" and rows[0]["shape"] == [32768, 128256]

import pytest

from nearlight.core.cost import Cost
from nearlight.profiler import verdicts

GIB = 2**30
FLOOR_US = 4.0


def row(gpu, cost, time_s, name="aten::op", calls=1):
    (made,) = verdicts.op_rows([(name, "m", cost, time_s)] * calls, gpu, FLOOR_US)
    return made


@pytest.mark.parametrize(
    ("name", "cost", "time_us", "bound"),
    [
        ("aten::add", Cost(bytes_read=GIB), 300, "memory"),
        ("aten::mm", Cost({"bf16": 10**12}, bytes_read=GIB // 8), 1500, "compute"),
        ("aten::mm", Cost({"bf16": 10**12}, bytes_read=GIB // 8), 9000, "latency"),
        ("aten::add", Cost(bytes_read=1000), 5, "launch"),
        ("aten::add", Cost(bytes_read=2**24), 12, "L2"),
        ("c10d::allreduce_", Cost(bytes_read=GIB), 300, "communication"),
        ("nccl_all_reduce", Cost(), 300, "communication"),
        ("somebody::op", None, 300, "unmodelled"),
        ("somebody::op", None, 2, "unmodelled"),
    ],
)
def test_bounds(h200, name, cost, time_us, bound):
    assert row(h200, cost, time_us * 1e-6, name).bound == bound


def test_a_row_sums_its_calls(h200):
    made = row(h200, Cost({"bf16": 100}, 2 * GIB, GIB), 1e-3, calls=3)
    assert (made.calls, made.flops, made.bytes) == (3, 300, 9 * GIB)
    assert made.time_ms == pytest.approx(3.0)
    assert made.limit_ms == pytest.approx(3 * 3 * GIB / 4.8e12 * 1e3)
    assert made.share == pytest.approx(made.limit_ms / made.time_ms)


def test_a_row_faster_than_its_limit_has_a_remark_and_no_share(h200):
    cost = Cost(bytes_read=GIB)
    limit_s = GIB / 4.8e12
    made = row(h200, cost, limit_s / 1.001)
    assert made.share is None and made.remark == verdicts.BEYOND_LIMIT
    assert made.limit_ms == pytest.approx(limit_s * 1e3)
    made = row(h200, cost, limit_s * 1.001)
    assert made.share == pytest.approx(1 / 1.001) and made.remark == ""


def test_time_without_a_cost_spoils_the_share_of_its_row(h200):
    calls = [("a", "", Cost(bytes_read=GIB), 1e-3), ("a", "", None, 1e-3)]
    (made,) = verdicts.op_rows(calls, h200, FLOOR_US)
    assert (made.share, made.bound, made.calls) == (None, "unmodelled", 2)
    assert made.time_ms == 2.0


def test_what_fits_l2_is_not_judged_by_bytes(h200):
    small = Cost({"bf16": 10**9}, bytes_read=h200.l2_bytes)
    assert verdicts.fits_l2(small, h200)
    assert verdicts.call_limit_s(small, h200) == pytest.approx(1e9 / 989.4e12)
    large = Cost({"bf16": 10**9}, bytes_read=h200.l2_bytes + 1)
    assert verdicts.call_limit_s(large, h200) == large.limit_s(h200)
    assert row(h200, Cost(bytes_read=2**24), 12e-6).share is None


def test_the_main_pipe_does_most_of_the_flops():
    costs = [Cost({"bf16": 5, "fp32": 1}), Cost({"fp32": 3}), Cost({"fp32": 2}), Cost()]
    assert verdicts.main_pipe(costs) == "fp32"
    assert verdicts.main_pipe(costs[:2]) == "bf16"
    assert verdicts.main_pipe([Cost()]) == ""


def test_rows_are_sorted_and_idle_time_is_one(h200):
    calls = [("a", "", Cost(), 1e-3), ("b", "", Cost(), 2e-3)]
    assert [r.name for r in verdicts.op_rows(calls, h200, FLOOR_US)] == ["b", "a"]
    idle = verdicts.idle_row(0.5)
    assert (idle.bound, idle.time_ms, idle.share) == ("idle", 500.0, None)

"""Launches that are repeated do what the implementation does, for every op that says so."""

import threading
from math import prod

import pytest
import torch
import triton
import triton.language as tl
from torch.testing import assert_close

from nearlight.core import backend, replay, tuned
from nearlight.core.replay import MAX_KINDS, Plan, Replayed
from nearlight.core.triton import Kernel, jit
from nearlight.ops import OPS
from nearlight.workbench.trial import Trial, call, make_inputs, make_upstream, run

# What their implementations do beside launching is no view: matrix products, sorting, zeros, a
# list of tensors; or they write into their arguments.
NOT_STATIC = {
    "adamw",
    "cross_entropy",
    "embedding",
    "group_norm",
    "linear_cross_entropy",
    "linear_log_prob",
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Repeat launches of CPU tensors, and say how many calls were."""
    monkeypatch.setattr(Replayed, "devices", frozenset(("cpu",)))
    repeated = []
    call_plan = Plan.__call__
    monkeypatch.setattr(Plan, "__call__", lambda *args: repeated.append(args) or call_plan(*args))
    tuned.forget()
    yield repeated
    tuned.forget()


def results_of(op, trial):
    torch.manual_seed(trial.seed)
    with backend.force("triton"):
        inputs = make_inputs(op, trial, "cpu")
        torch.manual_seed(trial.seed)
        upstream = make_upstream(call(op.function, inputs), trial)
        torch.manual_seed(trial.seed)
        result = run(op.function, inputs, upstream)
    return [*result.outputs, *(g for g in result.gradients.values() if g is not None)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_the_same_bits_whether_its_launches_are_repeated_or_not(
    name, on_cpu, monkeypatch
):
    op = OPS[name]
    cases = sorted(op.check_cases, key=lambda case: prod(case.shape.values()))[:8]
    trials = [Trial(case, seed=seed) for case in cases for seed in range(4)]
    found = [results_of(op, trial) for trial in trials]
    assert bool(on_cpu) == (name not in NOT_STATIC)
    monkeypatch.setattr(Replayed, "devices", frozenset())
    for trial, results in zip(trials, found, strict=True):
        right = results_of(op, trial)
        assert len(results) == len(right)
        for one, other in zip(results, right, strict=True):
            assert one.stride() == other.stride() and one.dtype == other.dtype, trial
            assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@jit
def _axpy_kernel(x_ptr, y_ptr, out_ptr, factor, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = (tl.load(ptr + at, at < N, other=0.0) for ptr in (x_ptr, y_ptr))
    tl.store(out_ptr + at, factor * x + y, at < N)


def _axpy(x, y, factor):
    rows, out = x.reshape(-1), torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = lambda bound: (triton.cdiv(bound["N"], bound["BLOCK"]),)  # noqa: E731  # as users write
    _axpy_kernel[grid](rows, y.reshape(-1), out, factor, rows.numel(), BLOCK=16)
    return out


@pytest.fixture
def axpy(on_cpu):
    return Replayed(_axpy)


def test_the_third_call_of_a_kind_repeats_the_second(axpy, on_cpu):
    for number in range(5):
        x, y = torch.randn(3, 7), torch.randn(3, 7)
        assert torch.equal(axpy(x, y, 2.0), 2 * x + y)
        assert len(on_cpu) == max(0, number - 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x[:, :6].contiguous(), y[:, :6].contiguous(), 2.0),
        lambda x, y: (x, y, 3.0),
        lambda x, y: (x, y, -0.0),
        lambda x, y: (x.double(), y.double(), 2.0),
        lambda x, y: (x.double(), y, 2.0),
        lambda x, y: (torch.cat([x, x]).view(-1)[1:22].view(3, 7), y, 2.0),
    ],
    ids=["shape", "number", "zero", "dtype", "one dtype", "alignment"],
)
def test_another_kind_is_not_repeated(axpy, on_cpu, change):
    for factor in (2.0, 0.0):
        for _ in range(3):
            axpy(torch.randn(3, 7), torch.randn(3, 7), factor)
    before = len(on_cpu)
    x, y, factor = change(torch.randn(3, 7), torch.randn(3, 7))
    out = axpy(x, y, factor)
    assert len(on_cpu) == before
    assert torch.allclose(out.double(), factor * x.double() + y.double())


def test_arguments_of_one_memory_and_of_two_are_told_apart(axpy, on_cpu):
    def halves():
        return torch.randn(6, 7).split(3)

    def same():
        x = torch.randn(3, 7)
        return x, x

    def apart():
        return torch.randn(3, 7), torch.randn(3, 7)

    for order in ((halves, apart), (apart, halves), (same, apart), (apart, same)):
        axpy = Replayed(_axpy)
        for make in (order[0],) * 4 + (order[1],) * 4:
            x, y = make()
            assert torch.equal(axpy(x, y, 2.0), 2 * x + y), order


def test_what_does_more_than_to_view_and_to_launch_is_never_repeated(on_cpu):
    def copies(x, y, factor):
        return _axpy(x.t().contiguous(), y.t().contiguous(), factor)

    def returns_a_view(x, y, factor):
        return _axpy(x, y, factor).view(-1)

    def returns_its_argument(x, y, factor):
        _axpy(x, y, factor)
        return x

    def launches_nothing(x, y, factor):
        return torch.empty_like(x)

    x, y = torch.randn(3, 7), torch.randn(3, 7)
    for implementation in (copies, returns_a_view, returns_its_argument, launches_nothing):
        again = Replayed(implementation)
        right = implementation(x, y, 2.0)
        for _ in range(4):
            out = again(x, y, 2.0)
            assert out.shape == right.shape
            assert implementation is launches_nothing or torch.equal(out, right)
    assert not on_cpu


def test_whoever_stands_between_sees_every_launch(axpy, on_cpu, monkeypatch):
    x, y = torch.randn(3, 7), torch.randn(3, 7)
    for _ in range(3):
        axpy(x, y, 2.0)
    assert len(on_cpu) == 1
    seen, start = [], Kernel._start
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "_start", lambda self, *args: seen.append(self) or start(self, *args))
        axpy(x, y, 2.0)
    assert seen == [_axpy_kernel] and len(on_cpu) == 1
    hooks = replay._hooks.launch_enter_hook
    hooks.add(print)
    try:
        axpy(x, y, 2.0)
    finally:
        hooks.remove(print)
    assert len(on_cpu) == 1
    axpy(x, y, 2.0)
    assert len(on_cpu) == 2


def test_another_choice_of_launches_is_taken_at_once(axpy, on_cpu):
    x, y = torch.randn(3, 7), torch.randn(3, 7)
    for _ in range(3):
        axpy(x, y, 2.0)
    tuned.forget()
    axpy(x, y, 2.0)
    assert len(on_cpu) == 1


def test_kinds_are_forgotten_where_there_are_too_many(axpy, on_cpu):
    x, y = torch.randn(1), torch.randn(1)
    for _ in range(2):
        axpy(x, y, 0.5)
    for number in range(MAX_KINDS):
        axpy(x, y, float(number))
    assert len(axpy._plans) <= MAX_KINDS
    axpy(x, y, 0.5)
    assert not on_cpu


def test_a_cpu_is_not_hurried():
    axpy = Replayed(_axpy)
    for _ in range(4):
        axpy(torch.randn(4), torch.randn(4), 2.0)
    assert not axpy._plans


def test_threads_that_note_at_once_leave_nothing_in_the_place_of_a_launch(on_cpu):
    both, leave = threading.Barrier(2), threading.Event()

    def slow(x, y, factor):
        if Kernel._start is not replay._START:  # noting
            both.wait(20)
            assert leave.wait(20)
        return _axpy(x, y, factor)

    again = Replayed(slow)
    x, y = torch.randn(3, 7), torch.randn(3, 7)
    again(x, y, 2.0)
    thread = threading.Thread(target=again, args=(x, y, 2.0))
    thread.start()
    both.wait(20)
    free, replay._is_free = replay._is_free, lambda device: True  # looked before the other noted
    try:
        assert torch.equal(Replayed(_axpy)(x, y, 2.0), 2 * x + y)
        other = Replayed(_axpy)
        other._plans[replay._kind((x, y, 2.0))] = None
        assert torch.equal(other(x, y, 2.0), 2 * x + y)
        assert other._plans[replay._kind((x, y, 2.0))] is None
    finally:
        replay._is_free = free
        leave.set()
        thread.join()
    assert Kernel._start is replay._START

import statistics
import time

import pytest
import torch

from nearlight.core import timing
from nearlight.core.errors import BadInput
from nearlight.core.timing import Timing


def make_timing(samples):
    return timing._summary("it", list(samples), "cpu clock", None)


def test_summary_gives_median_and_percentiles():
    result = make_timing([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (result.median_us, result.low_us, result.high_us) == (3.0, 2.0, 4.0)
    assert result.spread == pytest.approx(2 / 3)


def test_a_against_a_is_no_difference_and_three_percent_is_slower():
    generator = torch.Generator().manual_seed(0)
    same = slower = 0
    for _ in range(50):
        noise = torch.randn(2, 40, generator=generator) * 0.5
        a = make_timing((100 + noise[0]).tolist())
        b = make_timing((100 + noise[1]).tolist())
        c = make_timing((103 + noise[1]).tolist())
        same += timing.difference(a, b)[0] == "no difference"
        slower += timing.difference(c, a)[0] == "slower"
    assert same >= 48
    assert slower == 50


@pytest.mark.parametrize("samples", [[0.0] * 9, [-0.2, 0.1, 0.3, 0.1, -0.1]])
def test_a_call_that_enqueues_nothing_has_no_time(samples):
    """Its median may well be above 0, by noise alone."""
    with pytest.raises(BadInput, match="^it: the call enqueues nothing that can be timed"):
        make_timing(samples)


def test_a_sample_that_noise_swallowed_decides_nothing():
    noisy = make_timing([0.0, -4.0] + [2.0 + 0.01 * i for i in range(18)])
    twice = make_timing([2 * (2.0 + 0.01 * i) for i in range(-2, 18)])
    assert timing.difference(twice, noisy) == ("slower", 2.0)
    assert timing.difference(noisy, twice) == ("faster", 0.5)


def test_samples_of_one_round_are_paired_so_drift_cancels():
    # Both functions slow down fourfold during the run; the pairs still say 5%.
    drift = [100 * (1 + i / 10) for i in range(30)]
    a, b = make_timing(drift), make_timing([1.05 * x for x in drift])
    verdict, ratio = timing.difference(b, a)
    assert verdict == "slower"
    assert ratio == pytest.approx(1.05)


def test_compare_orders_sleeps_and_rotates_inputs():
    seen = []
    calls = [lambda: seen.append(0), lambda: seen.append(1), lambda: seen.append(2)]
    result = timing.compare(
        {"rotated": calls, "slow": lambda: time.sleep(0.002)},
        device="cpu",
        flush_bytes=0,
        min_repeats=9,
        max_seconds=0,
    )
    # One warm-up call of each input, then the inputs in turn.
    assert seen == [0, 1, 2] * 4
    assert isinstance(result["slow"], Timing)
    assert len(result["slow"].samples_us) == 9
    assert 2000 <= result["slow"].median_us < 20_000
    assert timing.difference(result["rotated"], result["slow"])[0] == "faster"


def test_host_cost_counts_the_caller_only():
    cost_us = timing.host_cost_us(lambda: time.sleep(0.001), calls=20)
    assert 1000 <= cost_us < 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_without_a_gpu_cuda_timing_says_what_to_do():
    with pytest.raises(RuntimeError, match="device='cpu'"):
        timing.compare({"a": lambda: None})


def test_time_call_is_compare_of_one():
    result = timing.time_call(lambda: None, device="cpu", flush_bytes=1024, min_repeats=5)
    assert result.median_us == statistics.median(result.samples_us)

"""`tune`: searches the launches of an op's kernels on this GPU and keeps what beats the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from nearlight.core import timing, tuned
from nearlight.core.errors import BadInput, one_line
from nearlight.core.hardware import require_gpu
from nearlight.core.op import Case, Inputs, Op
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Report, require_writable
from nearlight.core.timing import Timing
from nearlight.core.triton import Kernel
from nearlight.core.tuned import Asked
from nearlight.core.versions import versions
from nearlight.workbench.trial import (
    Standard,
    Trial,
    call,
    differentiable,
    make_inputs,
    make_upstream,
    roots_of,
)
from nearlight.workbench.tune_report import NUM_BEST, WRONG, Found, report_of, text
from nearlight.workbench.work import (
    NUM_SETS,
    Machine,
    Work,
    differs_after,
    differs_before,
    expected_of,
)

MAX_CANDIDATES = 64
SHORT_REPEATS = 5
# Of the best, beside the rule's.
LONG_REPEATS = 30

Timer = Callable[..., dict[str, Timing]]


def tune(
    op: Op,
    cases: Sequence[Case] | None = None,
    *,
    into_repo: bool = False,
    progress: Progress = silent,
) -> Report:
    """Search the launches that an op's rules choose, and keep what beats them beyond the spread.

    Every candidate is first held to the tolerance rule: what is wrong, spills more registers than
    the rule's launch or does not run is never timed. All others are timed interleaved, as `bench`
    does, and the best again beside the rule's with more samples. A row is written for each launch,
    where the rule is best, too (it says so and changes nothing). Rows serve exactly the arguments
    they were measured for.

    Args:
        op: the record of an op, nearlight's or the user's.
        cases: by default all of `op.cases`.
        into_repo: write the rows into the package's data instead of the user's folder.
        progress: told what goes on.

    Returns:
        A report with a row per launch; its proof fails where a rule is wrong, or further from the
        best than `MAX_RULE_LOSS`.

    Raises:
        MissingPart: there is no GPU.
        BadInput: the op has no rule that can be tuned, or a rule has too many candidates.

    Example:
        >>> from nearlight.workbench.load import load_op
        >>> print(tune(load_op("rms_norm")).answer)  # doctest: +SKIP
    """
    gpu = require_gpu("tune", "nearlight check and nearlight inspect need none")
    path_of = tuned.package_path if into_repo else tuned.user_path
    require_writable(path_of(op.name, gpu.key))
    tuned.read(path_of(op.name, gpu.key))  # rows that cannot be kept beside are refused now
    measured_on = versions(on_gpu=True)
    found = []
    for each in search(op, Machine("cuda", gpu), cases, progress=progress):
        found.append(each)
        if not each.fault:  # kept at once: who stops a long search has what it found
            path = path_of(each.asked.choice.name, gpu.key)
            tuned.save(path, [{**each.saved(), "gpu": gpu.key, "versions": measured_on}])
            progress(f"{each.asked.key} written to {path}")
    return report_of(op, gpu, found, measured_on)


def cases_named(op: Op, names: Sequence[str]) -> list[Case] | None:
    """Return cases by name, or by sizes ("rows=3000,N=5000") where none has them; None for all.

    Raises:
        BadInput: a name or sizes that the op does not have.
    """
    return [_case_named(op, name) for name in names] or None


def _case_named(op: Op, name: str) -> Case:
    known = {case.name: case for case in op.cases}
    if name in known:
        return known[name]
    if not op.cases:
        raise BadInput(f"{op.name} has no cases to tune; give its record at least one Case")
    first = op.cases[0]
    sizes = dict(part.partition("=")[::2] for part in name.split(","))
    if sizes.keys() != first.shape.keys() or not all(size.isdecimal() for size in sizes.values()):
        example = ",".join(f"{size}={value}" for size, value in first.shape.items())
        raise BadInput(
            f"{op.name} has no case {name!r}: allowed are {', '.join(known)}, or sizes ({example})"
        )
    return replace(first, name=name, shape={size: int(value) for size, value in sizes.items()})


def search(
    op: Op,
    machine: Machine,
    cases: Sequence[Case] | None = None,
    timer: Timer = timing.compare,
    progress: Progress = silent,
) -> Iterator[Found]:
    """Yield what `tune` finds on a machine, each launch once; arguments as there.

    Args:
        op: as for `tune`.
        machine: where it runs.
        cases: as for `tune`.
        timer: `nearlight.core.timing.compare`, or what stands in for it.
        progress: as for `tune`.
    """
    searched: set[Asked] = set()
    for case in op.cases if cases is None else cases:
        sets = [make_inputs(op, Trial(case, seed=seed), machine.device) for seed in range(NUM_SETS)]
        for asked, direction in _asked(op, sets[0], Trial(case)):
            if asked not in searched:
                searched.add(asked)
                place = Found(asked, case, direction, asked.choice.rule(**asked.arguments))
                yield _search(op, machine, place, sets, timer, progress)
        if machine.device == "cuda":
            torch.cuda.empty_cache()
    if not searched:
        raise BadInput(
            f"{op.name} asks no launch rule that can be tuned: decorate its `config(shape, dtype, "
            "gpu)` with `nearlight.core.tuned.tunable(name, candidates)`"
        )


def _asked(op: Op, inputs: Inputs, trial: Trial) -> Iterator[tuple[Asked, str]]:
    """Yield each launch that an op asks a rule for, and the direction to time it in.

    A launch of the forward alone is timed there, if the backward has launches of its own: else
    the forward does the backward's work, too.
    """
    with tuned.recorded() as inference, torch.no_grad():
        call(op.function, inputs)
    with tuned.recorded() as forward:
        outputs = call(op.function, inputs)
    roots, above = roots_of(outputs, make_upstream(outputs, trial))
    with tuned.recorded() as backward:
        if roots:
            wanted = [inputs[name] for name in differentiable(inputs)]
            torch.autograd.grad(roots, wanted, above, allow_unused=True)
    for asked in dict.fromkeys((*inference, *forward, *backward)):
        is_shared = asked in backward or (asked in forward and not backward)
        is_forward = asked in inference and not (roots and is_shared)
        yield asked, "forward" if is_forward else "forward_backward"


def _search(
    op: Op,
    machine: Machine,
    place: Found,
    sets: Sequence[Inputs],
    timer: Timer,
    progress: Progress,
) -> Found:
    """Try every candidate of a launch, time those that are right, and rank the best again."""
    asked, rule, is_backward = place.asked, place.rule, place.direction == "forward_backward"
    listed = {rule: ""} | dict(asked.choice.candidates(**asked.arguments)) | {rule: ""}
    candidates = [config for config, reason in listed.items() if not reason]
    if len(candidates) > MAX_CANDIDATES:
        raise BadInput(
            f"{op.name} {asked.key}: {len(candidates)} candidates, allowed are {MAX_CANDIDATES}; "
            "list fewer"
        )
    expected, _ = expected_of(op, sets[0], Trial(place.case), is_backward)
    dropped = {config: reason for config, reason in listed.items() if reason}
    max_spills = 0
    for number, config in enumerate(candidates, 1):
        progress(f"{op.name} {asked.key}: {number} of {len(candidates)}, {text(config)}")
        reason, spills = _fault(op, machine, place, expected, is_backward, config)
        if config == rule:
            max_spills = spills
        elif spills > max_spills and not reason:
            reason = f"spills {4 * spills} bytes a thread, the rule's launch {4 * max_spills}"
        if reason:
            dropped[config] = reason
    if rule in dropped:
        return replace(place, dropped=dropped, fault=f"the rule's launch: {dropped[rule]}")
    work = Work(op.function, sets, expected.upstream if is_backward else None)
    timed = partial(_time, timer, machine, asked, work)
    right = [config for config in candidates if config not in dropped]
    progress(f"{op.name} {asked.key}: timing {len(right)} launches {place.direction}")
    best = list(timed(right, min_repeats=SHORT_REPEATS, max_seconds=0.0))[:NUM_BEST]
    timings = timed(list(dict.fromkeys((*best, rule))), min_repeats=LONG_REPEATS)
    found = replace(place, timings=timings, dropped=dropped, num_timed=len(right))
    with tuned.forced(asked, found.kept):
        reason = differs_after(op, work, place.case, machine)
    own, limit_us = timings[found.kept], op.cost(place.case)[place.direction].limit_s(machine.gpu)
    limit_us *= 1e6
    if reason:
        return replace(found, fault=f"{text(found.kept)} after the timing: {reason}")
    if own.method == "events" and own.median_us < limit_us:
        fault = f"{own.median_us:.1f} µs is below the limit of {limit_us:.1f} µs"
        return replace(found, fault=f"{fault}: the timing or the cost formula is wrong")
    return found


def _fault(
    op: Op, machine: Machine, place: Found, expected: Standard, is_backward: bool, config: Any
) -> tuple[str, int]:
    """Say why a configuration must not be launched, or "", and the registers that it spills."""
    try:
        with tuned.forced(place.asked, config), _compiled() as kernels:
            given = (op, op.function, place.case, machine, expected, is_backward)
            reason = differs_before(*given)
    except Exception as error:  # out of shared memory, refused by the compiler: no candidate
        return one_line(error), 0
    spills = max((getattr(kernel, "n_spills", 0) for kernel in kernels), default=0)
    return (WRONG + reason if reason else ""), spills


def _time(
    timer: Timer,
    machine: Machine,
    asked: Asked,
    work: Work,
    configs: Sequence[Any],
    **options: Any,
) -> dict[Any, Timing]:
    """Time configurations interleaved; fastest first."""
    calls = {
        text(config): [partial(_call_under, asked, config, call) for call in work.calls()]
        for config in configs
    }
    timings = timer(calls, device=machine.device, **options)
    ranked = sorted(configs, key=lambda config: timings[text(config)].median_us)
    return {config: timings[text(config)] for config in ranked}


def _call_under(asked: Asked, config: Any, call: Callable[[], Any]) -> None:
    with tuned.forced(asked, config):
        call()


@contextmanager
def _compiled() -> Iterator[list[Any]]:
    """Note what Triton compiled each launch inside the block to."""
    seen: list[Any] = []
    start = Kernel._start

    def note(self: Kernel, *args: Any) -> Any:
        seen.append(start(self, *args))
        return seen[-1]

    with mock.patch.object(Kernel, "_start", note):
        yield seen

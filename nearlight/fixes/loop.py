"""The main job: look, find, fix one by one, prove, and look again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from nearlight.core import env
from nearlight.core.errors import BadInput
from nearlight.core.hardware import Gpu, detect_gpu, find_gpu
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Finding, Proof, Report, State, gib
from nearlight.core.versions import peer_versions, versions
from nearlight.fixes import kernels
from nearlight.fixes.fix import Fix, NothingToDo
from nearlight.fixes.peers import check_peers, step_rows
from nearlight.fixes.program import Measured, Predicted, Program
from nearlight.fixes.proof import prove
from nearlight.profiler import rules
from nearlight.profiler import target as targets
from nearlight.profiler.predict import capacity_bytes, setup_line
from nearlight.profiler.target import LossFunction, Target

DEFAULT_GPU = "h200"
FIXES: dict[str, Fix] = {fix.name: fix for fix in kernels.FIXES}


def optimize(
    model: nn.Module | str,
    batch: Any = None,
    task: str = "train",
    *,
    loss_fn: LossFunction | None = None,
    gpu: str | None = None,
    keep: bool = False,
    progress: Progress = silent,
) -> Report:
    """Bring a model to the limit of its GPU, one proved fix at a time.

    Args:
        model: a live model, or a target as the command line takes it ("smollm2-135m").
        batch: keyword arguments of one step, tensors of shape (batch, ...); with labels for
            training. Not needed for a preset.
        task: "train", "prefill" or "decode".
        loss_fn: `(model, batch) -> scalar tensor` for a live model whose output has no `loss`.
        gpu: key of the GPU table: predict for it. By default the GPU of this machine is
            measured; without one, an H200 is predicted.
        keep: leave the fixes on the live model (`nearlight.unpatch` undoes them), if their proof
            passed; else the model comes back as it was.
        progress: called with a line about each long step.

    Returns:
        The report: before, after, findings and proof.

    Raises:
        BadInput: a target, task, batch or GPU that cannot be used.

    Example:
        >>> report = nearlight.optimize("smollm2-135m", gpu="h200")  # doctest: +SKIP
        >>> report.after.step_ms < report.before.step_ms  # doctest: +SKIP
        True
    """
    if isinstance(model, str):
        if keep:
            raise BadInput("keep=True needs a live model; a name has none to keep")
        return optimize_target(targets.load(model, task=task), gpu, progress=progress)
    target = targets.from_model(model, batch, task, loss_fn)
    report = optimize_target(target, gpu, progress=progress)
    if keep and report.proof is not None and report.proof.passed:
        for name in dict.fromkeys(f.fix for f in report.findings if f.applied):
            FIXES[name].apply(model)
        return replace(
            report, next="next: the kernels are in; nearlight.unpatch(model) undoes them"
        )
    return report


def optimize_target(
    target: Target,
    gpu: str | None = None,
    *,
    peers: Sequence[str] = (),
    progress: Progress = silent,
) -> Report:
    """Run the main job on a loaded target.

    Args:
        target: the program.
        gpu: as for `optimize`.
        peers: other libraries whose step is measured in the same run; needs a GPU.
        progress: as for `optimize`.
    """
    check_peers(peers, target)
    here = detect_gpu() if gpu is None else None
    chosen = here or find_gpu(gpu or DEFAULT_GPU)
    targets.check_gpu(target, chosen)
    if peers and here is None:
        raise BadInput("peers are measured, not predicted: leave them out without a GPU")
    progress(f"tracing {target.name}" if here is None else f"measuring {target.name}")
    program: Program = Predicted(target, chosen) if here is None else Measured(target, here)
    try:
        before = program.state([])
        findings = rules.find(program.traced([]), before, chosen)
        proof: Proof | None = None
        kept: list[Fix] = []
        if env.read("NEARLIGHT"):
            is_tight = before.peak_bytes > capacity_bytes(chosen)
            findings, kept = _fix(program, findings, is_tight, progress)
            program.release()
            device = "cpu" if here is None else "cuda"
            proof, kept, findings = _proved(target, findings, kept, device, progress)
        else:
            findings = [replace(f, note="NEARLIGHT=off: nothing is applied") for f in findings]
        after = program.state(kept)
        if kept:
            left = rules.find(program.traced(kept), after, chosen)
            findings = _what_is_left(findings, left)
    finally:
        program.close()
    del program  # its model makes room for the peers' own
    if peers:
        progress(f"the same step under {', '.join(peers)}")
    return Report(
        verb="optimize",
        answer=_answer(target, chosen, before, after, kept, proof),
        target=target.name,
        task=target.task,
        gpu=chosen.key,
        setup=setup_line(target)
        + ("" if here or gpu else f"; no GPU here: predicted for {chosen.key}"),
        versions=versions(on_gpu=here is not None) | (peer_versions() if peers else {}),
        before=before,
        after=after,
        findings=findings,
        proof=proof,
        rows=step_rows(target, peers, kept, before) if peers else (),
        next=_next(target, kept, proof),
    )


def _fix(
    program: Program, findings: Sequence[Finding], is_tight: bool, progress: Progress
) -> tuple[list[Finding], list[Fix]]:
    """Apply what helps, the largest promise first, each gain on top of the ones before.

    A fix helps when it saves time beyond the noise, or memory at no cost in time; where the
    program does not fit, memory at any cost.
    """
    kept: list[Fix] = []
    told: list[Finding] = []
    for finding in findings:
        fix = FIXES.get(finding.fix)
        if fix is None:
            told.append(finding)
            continue
        if fix in kept:
            told.append(replace(finding, applied=True, note=f"{fix.name} stands already"))
            continue
        progress(f"{fix.name}: {finding.title}")
        try:
            gain = program.gain(kept, fix)
        except NothingToDo as reason:
            told.append(replace(finding, note=f"not applied: {reason}", next_step=""))
            continue
        came = f"{gain.ms:.2f} ms and {gain.bytes / 2**20:.0f} MiB on top of the ones before"
        costs_nothing = gain.ms >= -gain.spread_ms
        if gain.ms > gain.spread_ms or (gain.bytes > 0 and (costs_nothing or is_tight)):
            kept.append(fix)
            told.append(replace(finding, applied=True, note=f"saved {came}"))
        else:
            note = f"undone: it saved {came}, noise {gain.spread_ms:.2f} ms"
            told.append(replace(finding, note=note, next_step=""))
    return told, kept


def _what_is_left(told: Sequence[Finding], left: Sequence[Finding]) -> list[Finding]:
    """Return what was tried, and of the rest what still holds of the program as fixed.

    Args:
        told: findings of the program as found, with what came of their fixes.
        left: findings of the program as fixed.
    """
    gone = "not so any more with the fixes"
    tried = [finding for finding in told if finding.fix in FIXES]
    tried += [
        replace(finding, applied=True, note=gone)
        for finding in told
        if rules.is_blocking(finding) and not any(map(rules.is_blocking, left))
    ]
    return rules.ordered([*tried, *(finding for finding in left if finding.fix not in FIXES)])


def _proved(
    target: Target,
    findings: list[Finding],
    kept: list[Fix],
    device: str,
    progress: Progress,
) -> tuple[Proof | None, list[Fix], list[Finding]]:
    """Prove all kept fixes together; where that fails, keep those that prove one after another.

    A proof that could not be run (no memory, no layers) keeps the fixes and says so.
    """
    if not kept:
        return None, kept, findings
    proof = prove(target, kept, device, progress)
    if proof.passed or not proof.rows:
        return proof, kept, findings
    together = proof
    sound: list[Fix] = []
    refused: dict[str, str] = {}
    for fix in kept:
        progress(f"proving {fix.name}")
        attempt = prove(target, [*sound, fix], device, progress)
        if attempt.passed:
            proof, sound = attempt, [*sound, fix]
        else:
            worst = attempt.rows[0] if attempt.rows else {"name": "", "reason": attempt.method}
            refused[fix.name] = f"undone: the proof fails at {worst['name']}: {worst['reason']}"
    findings = [
        replace(finding, applied=False, note=refused[finding.fix])
        if finding.applied and finding.fix in refused
        else finding
        for finding in findings
    ]
    return (proof if sound else together), sound, findings


def _answer(
    target: Target,
    gpu: Gpu,
    before: State,
    after: State,
    kept: Sequence[Fix],
    proof: Proof | None,
) -> str:
    if not kept:
        nothing = (
            "nothing to apply" if proof is None else "every fix failed the proof and is undone"
        )
        return (
            f"{target.name} on {gpu.key}: {_duration(before.step_ms)} a step "
            f"({before.mode}), {gib(before.peak_bytes)}; {nothing}"
        )
    proved = "results proved the same" if proof and proof.passed else "NOT PROVED"
    return (
        f"{target.name} on {gpu.key}: {_duration(before.step_ms)} → {_duration(after.step_ms)} "
        f"a step ({before.step_ms / after.step_ms:.2f} × as fast), "
        f"{gib(before.peak_bytes)} → {gib(after.peak_bytes)}, "
        f"{after.mode}; {proved}"
    )


def _duration(time_ms: float) -> str:
    return f"{time_ms:.1f} ms" if time_ms >= 1 else f"{time_ms * 1e3:.0f} µs"


def _next(target: Target, kept: Sequence[Fix], proof: Proof | None) -> str:
    if proof is None and target.is_live:
        return "next: nearlight.predict(model, batch, gpu=[...]) compares GPUs"
    if proof is None:
        return f"next: nearlight predict {target.name} --gpu NAME,NAME compares GPUs"
    if not kept:
        return "next: report the first row of the proof; the model stays as it is"
    if not proof.passed:
        return f"next: do not use these fixes before a proof has passed ({proof.method})"
    names = ", ".join(repr(fix.name.removeprefix("patch:")) for fix in kept)
    return f"next: nearlight.patch(model, only=[{names}]) after the model is built"

"""The proof of a model: loss, logits and every gradient, patched against unpatched.

Both are held against a truth in fp64 by the one tolerance rule. The truth is the model as found,
unpatched: a fault in how a fix is wired cannot hide in it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from nearlight.core import backend
from nearlight.core.float64 import KeepFloat64, float64_copy
from nearlight.core.numerics import Judgement
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Proof
from nearlight.fixes.fix import Fix
from nearlight.fixes.program import applied
from nearlight.fixes.proof_by_layer import longest_stack, prove_by_layer
from nearlight.fixes.proof_runs import (
    Row,
    by_draws,
    cast,
    free_bytes,
    judged,
    needs,
    one_sequence,
    repeatable,
    run,
    settled,
    worst_first,
)
from nearlight.profiler.target import Batch, Target, sizes

# Tokens of the one sequence: with Triton's interpreter, and on a GPU.
CPU_TOKENS, CUDA_TOKENS = 32, 1024
# Larger models are proved one layer at a time.
LARGEST_WHOLE = 3_000_000_000
# What a whole-model proof holds per parameter beside the model as loaded: a copy in the dtype of
# the proof, two sets of gradients, and the truth with its gradients.
WHOLE_BYTES_PER_PARAMETER = 4 + 2 * 4 + 2 * 8


def prove(
    target: Target, fixes: Sequence[Fix], device: str = "cpu", progress: Progress = silent
) -> Proof:
    """Prove that `fixes` keep a model's loss, logits and gradients (inference: its output).

    Every quantity's error against fp64 must be at most twice that of plain PyTorch plus two units
    in the last place. Up to 3B parameters the whole model is run; above that, and where memory is
    short, one decoder layer at a time on inputs captured from the plain model.

    Args:
        target: the program; a live model of the caller's is not changed in any way.
        fixes: what is to be proved.
        device: "cuda" runs the compiled kernels in the target's dtype, "cpu" interprets them
            in fp32.
        progress: told what goes on.

    Returns:
        A row per quantity, the worst one first. Without rows the proof was not run, and `method`
        says why.

    Example:
        >>> from nearlight.profiler.target import from_model
        >>> model, x = nn.Sequential(nn.LayerNorm(8)), torch.ones(1, 4, 8)
        >>> loss = lambda model, batch: model(batch["x"]).square().sum()
        >>> prove(from_model(model, {"x": x}, loss_fn=loss), []).passed
        True
    """
    size = _bytes_as_loaded(target)
    if size > (free := free_bytes(device)):
        return Proof(False, [], f"not run: {needs(size, free, device)} for the model alone")
    progress("loading the model for the proof")
    model = target.make_model(device)
    tokens = CPU_TOKENS if device == "cpu" else CUDA_TOKENS
    samples = target.make_batch(device)
    batch = one_sequence(samples, tokens)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    too_large = _too_large(num_parameters, device)
    if not too_large:
        try:
            rows = _prove_whole(target, model, fixes, samples, device, progress)
            how = f"whole model{_layers(model)}"
            return _proof(rows, f"{_where(target, batch, device)}, {how}")
        except torch.cuda.OutOfMemoryError:
            too_large = "the GPU's memory did not last for the whole model"
        torch.cuda.empty_cache()
    proof = prove_by_layer(target, model, fixes, batch, device, progress)
    how = f"{proof.method} ({too_large})"
    if not proof.rows:
        return Proof(False, [], how)
    return _proof([dict(row) for row in proof.rows], f"{_where(target, batch, device)}, {how}")


def _proof(rows: list[Row], method: str) -> Proof:
    doubtful = sum("draws" in row for row in rows)
    if doubtful:
        method += f"; {doubtful} of {len(rows)} rows drawn again with other inputs"
    return Proof(all(row["passed"] for row in rows), worst_first(rows), method)


def _prove_whole(
    target: Target,
    found: nn.Module,
    fixes: Sequence[Fix],
    samples: Batch,
    device: str,
    progress: Progress,
) -> list[Row]:
    is_cpu = device == "cpu"
    # A copy of a live model: it keeps its gradients, its dtype and its mode.
    model = copy.deepcopy(found) if target.is_live else found
    model = settled(model, device, target.task == "train")

    def attempt(draw: int) -> dict[str, Judgement]:
        batch = one_sequence(samples, CPU_TOKENS if is_cpu else CUDA_TOKENS, draw)
        batch = cast(batch, torch.float32) if is_cpu else batch
        words = f", sample {draw + 1}" if draw else ""
        progress(f"plain PyTorch{words}")
        with repeatable(device):
            plain = run(target, model, batch)
        # Before any fix is applied: one that is not undone exactly cannot reach it.
        progress(f"the truth in fp64{words}")
        with repeatable(device), KeepFloat64():
            truth = run(target, float64_copy(model), cast(batch, torch.float64))
        progress("the fixed model" + (", kernels interpreted" if is_cpu else "") + words)
        with repeatable(device), backend.force("triton"), applied(model, fixes):
            ours = run(target, model, batch)
        progress("comparing")
        return judged(ours, plain, truth)

    return by_draws(attempt, sizes(samples).num_samples)


def _where(target: Target, batch: Batch, device: str) -> str:
    where = "interpreted on the CPU in fp32" if device == "cpu" else "on the GPU"
    ids = batch.get("input_ids")
    words = f"{ids.shape[-1]} tokens" if ids is not None else "one sample"
    return f"{where}, {words}, {'real' if target.is_real else 'random'} weights, against fp64"


def _layers(model: nn.Module) -> str:
    stack = longest_stack(model)[1]
    return "" if stack is None else f", all {len(stack)} layers"


def _too_large(num_parameters: int, device: str) -> str:
    """Say why a model that is loaded cannot be proved as a whole; "" if it can."""
    if num_parameters > LARGEST_WHOLE:
        return f"{num_parameters / 1e9:.1f}B parameters, whole up to {LARGEST_WHOLE / 1e9:.0f}B"
    needed = num_parameters * WHOLE_BYTES_PER_PARAMETER
    free = free_bytes(device)
    return "" if needed <= free else f"{needs(needed, free, device)} for the whole model"


def _bytes_as_loaded(target: Target) -> int:
    """Return the bytes of a model before it is made; 0 where only the user's code can tell."""
    if target.is_live or target.batch is None:
        return 0
    shapes = target.make_model("meta", weights=False)
    return sum(parameter.numel() * parameter.element_size() for parameter in shapes.parameters())

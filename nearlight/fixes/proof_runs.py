"""How a model is run for a proof, and how two runs are judged against the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from nearlight.core.numerics import NUM_DRAWS, Judgement, failure, judge, redraw
from nearlight.profiler.target import Batch, Target
from nearlight.profiler.target.record import first_tensor

SEED = 0
# Names of a batch that only the loss needs.
LABELS = ("labels", "num_items_in_batch", "shift_labels")
# What transformers' losses leave out.
IGNORED = -100
# Batches of these carry tokens along their second dimension and can be cut.
TOKENS = ("input_ids", "inputs_embeds")

Row = dict[str, Any]
Results = dict[str, torch.Tensor]
Module = TypeVar("Module", bound=nn.Module)

_DROPOUTS: frozenset[Any] = frozenset(
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
     torch.dropout, torch.alpha_dropout, torch.feature_dropout)
)  # fmt: skip
_SDPA_DROPOUT_ARGUMENT = 4


class _NoDropout(TorchFunctionMode):
    """Turns dropout off in training mode: fp32 and fp64 draw different masks from one seed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _SDPA_DROPOUT_ARGUMENT:
                before, after = args[:_SDPA_DROPOUT_ARGUMENT], args[_SDPA_DROPOUT_ARGUMENT + 1 :]
                args = (*before, 0.0, *after)
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def repeatable(device: str) -> Iterator[None]:
    """Make runs comparable: no dropout, the same seed, the caller's random state restored."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), _NoDropout():
        torch.manual_seed(SEED)
        yield


def one_sequence(batch: Batch, max_tokens: int, draw: int = 0) -> Batch:
    """Return one sample of a batch, of at most `max_tokens` tokens.

    Every dimension as long as the sequence is cut (masks have two). The window is the first one
    that holds most labels, so that a masked prompt does not leave a loss over nothing. A cache of
    the task decode ("past", layers × 2 × batch × heads × tokens × width) is cut alike. A batch
    without tokens is left at its size.

    Args:
        batch: of a target.
        max_tokens: longest sequence.
        draw: take the sample that comes so many later.
    """
    ids = next((batch[name] for name in TOKENS if name in batch), None)
    if ids is None or ids.ndim < 2:
        return {
            name: value[draw % len(value) :][:1] if value.ndim else value
            for name, value in batch.items()
        }
    num_samples, length = ids.shape[:2]
    kept = min(length, max_tokens)
    sample, start = _window(batch.get("labels"), kept, draw % num_samples)

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "past":
            return value[:, :, sample : sample + 1, :, :max_tokens].contiguous()
        if value.ndim and value.shape[0] == num_samples:
            value = value[sample : sample + 1]
        for dim in range(value.ndim):
            if value.shape[dim] == length and length > kept:
                value = value.narrow(dim, start, kept)
        return value.contiguous()

    return {name: cut(name, value) for name, value in batch.items()}


def _window(labels: torch.Tensor | None, length: int, draw: int) -> tuple[int, int]:
    """Return the sample and the start of the window with most targets; the first token has none.

    A later draw takes the samples after the best one.
    """
    if labels is None or labels.ndim != 2 or length < 2 or length > labels.shape[1]:
        return draw, 0
    counts = (labels[:, 1:] != IGNORED).long().unfold(1, length - 1, 1).sum(-1)
    best = int((counts == counts.max()).flatten().nonzero()[0]) // counts.shape[1]
    sample = (best + draw) % counts.shape[0]
    return sample, int((counts[sample] == counts[sample].max()).nonzero()[0])


def settled(part: Module, device: str, is_training: bool) -> Module:
    """Put a module of the proof's own on its device, into its mode and, on a CPU, into fp32."""
    for module in part.modules():
        if getattr(module, "gradient_checkpointing", False):
            # Recomputing happens on threads that know nothing of the fp64 mode.
            module.gradient_checkpointing = False  # type: ignore[assignment]  # a flag of theirs
    part.train(is_training)
    return part.to(device).float() if device == "cpu" else part.to(device)


def cast(batch: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Batch:
    """Return the batch with its floating tensors in `dtype`."""
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }


def run(target: Target, model: nn.Module, batch: Batch) -> Results:
    """Return what one step computes, by name; nothing is left on the model.

    For training: the loss, the model's output (logits) and every parameter's gradient. Where the
    model fuses its loss and gives no logits with labels, they come from a second run without
    labels, in evaluation mode. For inference: the output.
    """
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(_main_output(output, target.name).detach())

    if target.task != "train":
        with torch.no_grad():
            return {"output": target.loss(model, batch)}
    model.zero_grad(set_to_none=True)
    handle = model.register_forward_hook(keep)
    try:
        loss = target.loss(model, batch)
        torch.autograd.backward(loss)
    finally:
        handle.remove()
    results = {"loss": loss.detach()}
    if outputs:
        is_fused = outputs[0].numel() == 0
        results["logits"] = _without_labels(target, model, batch) if is_fused else outputs[0]
    results |= gradients(model)
    return results


def gradients(model: nn.Module) -> Results:
    """Take every parameter's gradient off a model, by name."""
    found = {
        f"gradient of {name}": parameter.grad.detach()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def _main_output(output: Any, name: str) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else first_tensor(output, name)


def _without_labels(target: Target, model: nn.Module, batch: Batch) -> torch.Tensor:
    was_training = model.training
    model.eval()
    try:
        inputs = {name: value for name, value in batch.items() if name not in LABELS}
        with torch.no_grad():
            return _main_output(model(**inputs), target.name)
    finally:
        model.train(was_training)


def judged(
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
) -> dict[str, Judgement]:
    """Return a judgement per quantity of any of the three runs; one that a run lacks fails."""
    judgements = {}
    for name in dict.fromkeys((*truth, *plain, *ours)):
        runs = {"patched": ours, "plain": plain, "fp64": truth}
        missing = [words for words, results in runs.items() if name not in results]
        if missing:
            judgements[name] = failure(f"not computed by the {' and the '.join(missing)} run")
        elif not ours[name].shape == plain[name].shape == truth[name].shape:
            shapes = {words: tuple(results[name].shape) for words, results in runs.items()}
            judgements[name] = failure(f"shapes differ: {shapes}")
        else:
            judgements[name] = judge(ours[name], plain[name], truth[name])
    return judgements


def by_draws(attempt: Callable[[int], dict[str, Judgement]], num_inputs: int) -> list[Row]:
    """Judge by one draw of the inputs, and what breaks the rule there by further ones.

    Args:
        attempt: number of a draw to its judgements by name.
        num_inputs: how many different draws there are. The first raises the doubt, and of the
            others as many as `redraw` asks for decide.

    Returns:
        A row per quantity: name, passed, reason; where the error is a number also error and
        plain_error (of the whole tensor) and of_allowed (the largest of the three measures over
        its limit); where it was drawn again also draws.
    """
    decided = redraw(attempt(0), attempt, min(NUM_DRAWS, num_inputs - 1))
    return [_row(name, judgement) for name, judgement in decided.items()]


def worst_first(rows: list[Row]) -> list[Row]:
    """Sort rows: failed ones first, then the nearest to its limit."""
    return sorted(rows, key=lambda row: (row["passed"], -row.get("of_allowed", float("inf"))))


def _row(name: str, judgement: Judgement) -> Row:
    row: Row = {"name": name, "passed": judgement.passed, "reason": judgement.reason}
    numbers = (judgement.share, judgement.plain.whole)
    if all(map(isfinite, numbers)):  # a report holds no NaN; the reason tells
        row |= {
            "error": judgement.ours.whole,
            "plain_error": judgement.plain.whole,
            "of_allowed": judgement.share,
        }
    return row | ({"draws": judgement.num_draws} if judgement.num_draws else {})


def needs(needed: float, free: float, device: str) -> str:
    """Say how much memory is needed and how much there is."""
    kind = "memory" if device == "cpu" else "GPU memory"
    return f"{needed / 2**30:.1f} GiB of {kind} needed and {free / 2**30:.1f} GiB free"


def free_bytes(device: str) -> int:
    """Return free memory; on the host what Linux says is available, caches included."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")

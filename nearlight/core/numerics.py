"""Error measures and the one tolerance rule that every op and model is held to."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from math import isfinite

import torch

# A result may err this many times as much as plain PyTorch in the same dtype ...
PLAIN_FACTOR = 2.0
# ... plus this many units in the last place of the output dtype, at the row's scale.
FLOOR_ULP = 2.0
# Errors are taken in blocks of rows of about this size: the gradient of a vocabulary in fp64 is
# gigabytes, and its copies would not fit beside it.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Errors:
    """An error taken three ways against the truth, all relative.

    Attributes:
        max_at_row_scale: largest absolute error over the largest magnitude of its row.
        worst_row: largest relative 2-norm of a row's error.
        whole: relative 2-norm of the whole tensor's error.
    """

    max_at_row_scale: float
    worst_row: float
    whole: float


@dataclass(frozen=True)
class Judgement:
    """The tolerance rule's answer for one tensor."""

    passed: bool
    ours: Errors
    plain: Errors
    allowed: Errors
    reason: str = ""


def errors(actual: torch.Tensor, truth: torch.Tensor) -> Errors:
    """Measure `actual` against `truth` of the same shape; rows lie along the last dimension."""
    if actual.shape != truth.shape:
        raise ValueError(f"shape {tuple(actual.shape)} against truth {tuple(truth.shape)}")
    if truth.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    width = truth.shape[-1] if truth.ndim else 1
    block_rows = max(1, BLOCK_ELEMENTS // width)
    truth_blocks = truth.detach().double().reshape(-1, width).split(block_rows)
    blocks = actual.detach().reshape(-1, width).split(block_rows)
    # A row that cancels to almost nothing is judged at the tensor's rounding level, not its own.
    largest = max(float(_finite(block).abs().max()) for block in truth_blocks)
    tiny = torch.finfo(torch.float64).tiny
    floor = max(largest * torch.finfo(_float_dtype(actual)).eps, tiny)
    measured = [_block_errors(*pair, floor) for pair in zip(blocks, truth_blocks, strict=True)]
    at_row_scale, of_row, norm, truth_norm = torch.tensor(measured, dtype=torch.float64).T
    return Errors(
        max_at_row_scale=float(at_row_scale.max()),
        worst_row=float(of_row.max()),
        whole=float(norm.norm()) / max(float(truth_norm.norm()), tiny),
    )


def _finite(truth: torch.Tensor) -> torch.Tensor:
    return torch.where(truth.isfinite(), truth, 0.0)


def _block_errors(
    actual: torch.Tensor, truth: torch.Tensor, floor: float
) -> tuple[float, float, float, float]:
    """Return largest error at row scale, worst row, norm of the error, norm of the truth."""
    wide = actual.to(truth.device, torch.float64)
    # Equal infinities agree; any other non-finite difference stays one and fails the rule.
    difference = torch.where(wide == truth, 0.0, wide - truth)
    finite = _finite(truth)
    row_scale = finite.abs().amax(1).clamp_min(floor)
    row_norm, truth_norm = difference.norm(dim=1), finite.norm(dim=1)
    return (
        float((difference.abs().amax(1) / row_scale).max()),
        float((row_norm / truth_norm.clamp_min(floor * truth.shape[1] ** 0.5)).max()),
        float(row_norm.norm()),
        float(truth_norm.norm()),
    )


def judge(
    actual: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> Judgement:
    """Apply the tolerance rule.

    Each measure of `actual`'s error must be at most twice that of `plain` (plain PyTorch in the
    same dtype) plus two units in the last place of the output dtype. NaN never passes unless
    the truth is NaN at the same places.

    Args:
        actual: our result.
        plain: plain PyTorch's result on the same inputs.
        truth: the reference in fp64 on the same inputs.
        dtype: dtype whose unit in the last place counts; `actual`'s by default.
    """
    # NaN where the truth is NaN (a mean over nothing) is agreement.
    both = truth.isnan() & actual.to(truth.device).isnan()
    if bool(both.any()):
        keep = ~both
        actual, plain, truth = (t.to(keep.device)[keep] for t in (actual, plain, truth))
    ours_errors, plain_errors = errors(actual, truth), errors(plain, truth)
    floor = FLOOR_ULP * torch.finfo(dtype or _float_dtype(actual)).eps
    # Where plain PyTorch fails outright (NaN, inf) it gives no allowance at all.
    allowed = Errors(
        *(PLAIN_FACTOR * e + floor if isfinite(e) else floor for e in astuple(plain_errors))
    )
    failed = [
        f"{field.name} {ours:.3g} > {limit:.3g}"
        for field, ours, limit in zip(
            fields(Errors), astuple(ours_errors), astuple(allowed), strict=True
        )
        if not ours <= limit
    ]
    return Judgement(not failed, ours_errors, plain_errors, allowed, "; ".join(failed))


def _float_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float64

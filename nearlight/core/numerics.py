"""Error measures and the one tolerance rule that every op and model is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from math import frexp, hypot, inf, isfinite

import torch

# A result may err this many times as much as plain PyTorch in the same dtype ...
PLAIN_FACTOR = 2.0
# ... plus this many units in the last place of the output dtype, at the row's scale.
FLOOR_ULP = 2.0
# What breaks the rule is drawn again with this many other inputs, an odd number: two roundings
# alone (a scalar loss) compare so badly that fewer let sound results fail or faults pass.
NUM_DRAWS = 31
# ... unless an error is this many times its limit. Where one rounding is held to another, 0.1% of
# sound results are, since P(|a / b| > 2 × 300) = 0.001 for two normal errors a and b.
BEYOND_LUCK = 300.0
# Errors are taken in blocks of rows of about this size: the gradient of a vocabulary in fp64 is
# gigabytes, and its copies would not fit beside it.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Errors:
    """An error taken three ways against the truth, all relative.

    Rows fainter than eps beside the largest row are taken by themselves: where they cancel, plain
    PyTorch errs as much as they are large, and that must not excuse the other rows.

    Attributes:
        max_at_row_scale: largest absolute error over its row's scale, the power of two at or below
            the row's largest magnitude: eps of it is exactly one unit in the last place there.
        worst_row: largest relative 2-norm of a row's error.
        whole: relative 2-norm of the whole tensor's error.
        faint_max_at_row_scale: the first measure, of faint rows.
        faint_worst_row: the second measure, of faint rows.
    """

    max_at_row_scale: float = field(metadata={"words": "largest error over its row's scale"})
    worst_row: float = field(metadata={"words": "error of the worst row"})
    whole: float = field(metadata={"words": "error of the whole"})
    faint_max_at_row_scale: float = field(
        default=0.0, metadata={"words": "among faint rows, largest error over its row's scale"}
    )
    faint_worst_row: float = field(
        default=0.0, metadata={"words": "among faint rows, error of the worst row"}
    )


@dataclass(frozen=True)
class Judgement:
    """The tolerance rule's answer for one tensor.

    Attributes:
        passed: whether every measure is within its limit.
        ours: our errors.
        plain: plain PyTorch's errors.
        allowed: the limits.
        reason: which measures are beyond their limit, or what else is wrong.
        floor: the part of the limits that does not depend on plain PyTorch.
        truth_norm: 2-norm of the truth.
        num_draws: further draws that decided; 0 where the first one did.
        num_excused: elements held to the terms that cancel there, in all draws that decided.
    """

    passed: bool
    ours: Errors
    plain: Errors
    allowed: Errors
    reason: str = ""
    floor: float = 0.0
    truth_norm: float = 0.0
    num_draws: int = 0
    num_excused: int = 0

    @property
    def shares(self) -> Errors:
        """Each measure over its limit; infinite where it is no number."""
        pairs = zip(astuple(self.ours), astuple(self.allowed), strict=True)
        return Errors(*(e / limit if isfinite(e) else inf for e, limit in pairs))

    @property
    def share(self) -> float:
        """The largest measure over its limit."""
        return max(astuple(self.shares))

    @property
    def may_be_luck(self) -> bool:
        """Whether further draws may be asked for: what is far beyond the limit is a fault."""
        return self.share <= BEYOND_LUCK


def failure(reason: str) -> Judgement:
    """Return the judgement of a result that cannot be measured; no luck explains it."""
    ours, plain, allowed = (Errors(*[x] * len(fields(Errors))) for x in (inf, 0.0, 1.0))
    return Judgement(False, ours, plain, allowed, reason)


def errors(actual: torch.Tensor, truth: torch.Tensor) -> Errors:
    """Measure `actual` against `truth` of the same shape; rows lie along the last dimension."""
    return _measure(actual, truth, _float_dtype(actual))[0]


def _measure(actual: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> tuple[Errors, float]:
    """Return the errors of a result in a dtype and the norm of the truth."""
    if actual.shape != truth.shape:
        raise ValueError(f"shape {tuple(actual.shape)} against truth {tuple(truth.shape)}")
    if truth.numel() == 0:
        return Errors(0.0, 0.0, 0.0), 0.0
    width = truth.shape[-1] if truth.ndim else 1
    block_rows = max(1, BLOCK_ELEMENTS // width)
    truth_blocks = truth.detach().double().reshape(-1, width).split(block_rows)
    blocks = actual.detach().reshape(-1, width).split(block_rows)
    # A row that cancels to nothing is judged at the noise of sums in fp32 beside the largest row,
    # which also bf16 kernels accumulate in; any other row at its own scale.
    largest = max(float(_finite(block).abs().max()) for block in truth_blocks)
    # All measures are relative: at its own scale no square leaves the range of fp64. A GPU divides
    # by a number as it multiplies by its reciprocal, which must be finite, too.
    unit = 2.0 ** max(frexp(largest)[1] - 1, -1022) if largest else 1.0
    largest /= unit
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(torch.float64).tiny
    floor = max(largest * min(eps, torch.finfo(torch.float32).eps), tiny)
    pairs = zip(blocks, truth_blocks, strict=True)
    measured = torch.tensor(
        [_block_errors(*pair, unit, floor, largest * eps) for pair in pairs], dtype=torch.float64
    )
    *of_rows, norm, truth_norm = measured.T
    whole_truth = max(float(truth_norm.norm()), tiny)
    at_row_scale, of_row, faint_at_row_scale, faint_row = (float(x.max()) for x in of_rows)
    whole = float(norm.norm()) / whole_truth
    found = Errors(at_row_scale, of_row, whole, faint_at_row_scale, faint_row)
    return found, min(whole_truth * unit, torch.finfo(torch.float64).max)


def _finite(truth: torch.Tensor) -> torch.Tensor:
    return torch.where(truth.isfinite(), truth, 0.0)


def _block_errors(
    actual: torch.Tensor, truth: torch.Tensor, unit: float, floor: float, faint: float
) -> tuple[float, ...]:
    """Return largest error at row scale and worst row, both of faint rows, both norms.

    All but the tensors are in terms of `unit`, a power of two.
    """
    wide, truth = actual.to(truth.device, torch.float64) * (1 / unit), truth * (1 / unit)
    # Equal infinities agree; any other non-finite difference stays one and fails the rule.
    difference = torch.where(wide == truth, 0.0, wide - truth)
    finite = _finite(truth)
    of_truth = finite.abs().amax(1)
    is_faint = of_truth < faint
    largest = of_truth.clamp_min(floor)
    row_scale = largest / (2 * largest.frexp().mantissa)  # exact: the power of two at or below
    row_norm, truth_norm = difference.norm(dim=1), finite.norm(dim=1)
    at_row_scale = difference.abs().amax(1) / row_scale
    of_row = row_norm / truth_norm.clamp_min(floor * truth.shape[1] ** 0.5)
    return (
        *(float(x.where(~is_faint, 0.0).max()) for x in (at_row_scale, of_row)),
        *(float(x.where(is_faint, 0.0).max()) for x in (at_row_scale, of_row)),
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
    actual, plain, truth = without(both, actual, plain, truth)
    dtype = dtype or _float_dtype(actual)
    ours_errors, truth_norm = _measure(actual, truth, dtype)
    plain_errors, _ = _measure(plain, truth, dtype)
    return _verdict(ours_errors, plain_errors, FLOOR_ULP * torch.finfo(dtype).eps, truth_norm)


def without(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with 0 where the mask is set: in all of them, it is no error."""
    if not bool(mask.any()):
        return tensors
    # Rows stay rows; a selection would make one row of them all.
    return tuple(tensor.masked_fill(mask.to(tensor.device), 0) for tensor in tensors)


def judge_cancelled(
    actual: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    terms: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Judgement]:
    """Apply the tolerance rule to the rows whose terms cancel alone, at the scale of these.

    A softmax under an upstream gradient that is constant along its rows has no gradient: what is
    left there is the rounding of the terms. Such a row's truth is below one unit in the last place
    of its largest term. Of plain PyTorch's error at most this unit counts, and the floor is two
    units of fp32, in which also 16-bit kernels add.

    Args:
        actual: our result.
        plain: plain PyTorch's.
        truth: the reference in fp64.
        terms: how large the results are when their terms do not cancel, elementwise.
        dtype: the results' dtype.

    Returns:
        A mask of the elements of these rows, and the judgement of them.
    """
    # Of fp8 whole digits would pass as the rounding of terms; its kernels work in 16 bits or more.
    unit = min(torch.finfo(x).eps for x in (dtype, torch.bfloat16))
    scale = _largest(terms)
    of_row = (_largest(truth) < unit * scale) & scale.isfinite()
    mask = of_row.expand_as(truth)
    width = truth.shape[-1] if truth.ndim else 1
    scales = scale[of_row].unsqueeze(-1)

    def relative(result: torch.Tensor) -> torch.Tensor:
        rows = result.detach().to(truth.device)[mask].view(-1, width)
        return (rows.double() - truth[mask].view(-1, width)) / scales

    ours, theirs = relative(actual), relative(plain).clamp(-unit, unit)
    floor = FLOOR_ULP * min(unit, torch.finfo(torch.float32).eps)
    found = _verdict(_of_size_one(ours), _of_size_one(theirs), floor, ours.numel() ** 0.5)
    return mask, replace(found, num_excused=ours.numel())


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True) if x.ndim else x.abs()


def _of_size_one(errors: torch.Tensor) -> Errors:
    """Return the measures of the errors of rows whose entries are all of size one."""
    if not errors.numel():
        return Errors(0.0, 0.0, 0.0)
    squares = errors.square()
    measures = errors.abs().max(), squares.mean(1).max().sqrt(), squares.mean().sqrt()
    return Errors(*map(float, measures))


def _verdict(ours: Errors, plain: Errors, floor: float, truth_norm: float) -> Judgement:
    # Where plain PyTorch fails outright (NaN, inf) it gives no allowance at all.
    limits = [PLAIN_FACTOR * e + floor if isfinite(e) else floor for e in astuple(plain)]
    failed = [
        f"{measure.metadata['words']} {error:.3g} > {limit:.3g}"
        for measure, error, limit in zip(fields(Errors), astuple(ours), limits, strict=True)
        if not error <= limit
    ]
    reason = "; ".join(failed)
    return Judgement(not failed, ours, plain, Errors(*limits), reason, floor, truth_norm)


def redraw(
    first: Mapping[str, Judgement],
    draw: Callable[[int], Mapping[str, Judgement]],
    num_draws: int = NUM_DRAWS,
) -> dict[str, Judgement]:
    """Judge results that break the rule by further draws of their inputs.

    Where few roundings decide (a scalar loss, a short row, a row that cancels), ours and plain
    PyTorch's compare by luck in one draw. The draw that raised the doubt is left out, the number
    of further ones is fixed beforehand, each is judged by the unchanged rule, and all are taken
    (see `together`).

    Args:
        first: judgements of the first draw, by name.
        draw: `(index) -> judgements` of a further one, from 1 on; made for all names at once.
        num_draws: how many; less than `NUM_DRAWS` only where there are no more inputs. Without
            any, and where no luck explains a result, the first draw stands.

    Returns:
        The judgements by name; what passed in the first draw stands.
    """
    doubtful = [name for name, judgement in first.items() if not judgement.passed]
    # If one result fails beyond doubt, so does what it belongs to: no draw can save it.
    if not doubtful or num_draws < 1 or not all(first[name].may_be_luck for name in doubtful):
        return dict(first)
    num_draws -= 1 - num_draws % 2  # an odd number has a middle one
    draws = [draw(index) for index in range(1, num_draws + 1)]
    lacking = failure("not computed in a further draw")
    decided = {name: together([d.get(name, lacking) for d in draws]) for name in doubtful}
    return {**first, **decided}


def together(draws: Sequence[Judgement]) -> Judgement:
    """Judge one result by several draws of its inputs.

    `whole`: all draws as one tensor, errors and truth alike, by the same rule; of single
    roundings this says most. Each row measure: the draw whose share of its own limit is the
    median, because the worst of rows that cancel has no mean to speak of.
    """
    num_draws, num_excused = len(draws), sum(j.num_excused for j in draws)
    for judgement in draws:
        if not isfinite(judgement.share):
            return replace(judgement, num_draws=num_draws, num_excused=num_excused)

    def middle(measure: str) -> Judgement:
        # A draw without such a row says nothing of it.
        telling = [j for j in draws if getattr(j.ours, measure) or getattr(j.plain, measure)]
        ordered = sorted(telling or draws, key=lambda j: getattr(j.shares, measure))
        return ordered[(len(ordered) - 1) // 2]

    by_row = [measure.name for measure in fields(Errors) if measure.name != "whole"]
    chosen = {measure: middle(measure) for measure in by_row}
    largest = max(judgement.truth_norm for judgement in draws) or 1.0
    weights = [judgement.truth_norm / largest for judgement in draws]
    weight = hypot(*weights)

    def decided(which: str) -> Errors:
        """Return the errors that decide: of "ours" or of "plain"."""
        norms = [getattr(j, which).whole * w for j, w in zip(draws, weights, strict=True)]
        rows = {name: getattr(getattr(j, which), name) for name, j in chosen.items()}
        return Errors(**rows, whole=hypot(*norms) / weight if weight else 0.0)

    found = _verdict(decided("ours"), decided("plain"), draws[0].floor, weight * largest)
    return replace(found, num_draws=num_draws, num_excused=num_excused)


def _float_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float64

"""What the kernels of cross entropy do with the tiles of a row: sum them, write their gradient.

A tile is BLOCK_R × BLOCK_C columns of a row, walked so that a thread keeps its own columns of every
tile: maxima and sums stay with the thread (a "lane" is one of the BLOCK_C places) and meet once at
the end of the row. No tile waits at a barrier, so that loads of the next are on their way.
"""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl

from nearlight.core.triton import jit
from nearlight.ops.linear_cross_entropy.kernels import _tanh


@jit
def exp(x, ACC: tl.constexpr):
    """Return eˣ in three instructions: `tl.exp` spends three more on results below 1e-38."""
    if ACC == tl.float32:
        return tl.exp2(x * 1.4426950408889634)
    else:
        return tl.exp(x)


@jit
def transform(raw, ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the final logits of a tile and the derivative of the cap."""
    logits = raw.to(ACC)
    slope = logits
    if SCALE != 1.0:
        logits = logits * SCALE
    if SOFTCAP is not None:
        bent, slope = _tanh(logits / SOFTCAP, ACC)
        logits = bent * SOFTCAP
    return logits, slope


@jit
def _places(start, shift, end, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a tile's places, counted from a row's aligned start, and which are of the row."""
    places = start + tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return places[None, :, :], ((places >= shift) & (places < end))[None, :, :]


@jit
def _phase(PHASE: tl.constexpr, end, ALIGNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where tiles begin and stop: the first where rows start anywhere, whole ones, the last.

    Only whole tiles go without a mask, which would cost them the width of their accesses.
    """
    first: tl.constexpr = BLOCK if ALIGNS else 0
    full_end = tl.maximum(end // BLOCK * BLOCK, first)
    if PHASE == 0:
        return 0, tl.minimum(end, BLOCK)
    elif PHASE == 1:
        return first, full_end
    else:
        return full_end, end


@jit
def _load(pointers, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask, other=0.0, eviction_policy=POLICY)
    return tl.load(pointers, eviction_policy=POLICY)


@jit
def _has_target(target, start, shift, BLOCK: tl.constexpr):
    """Return whether the label of a row of the program lies in a tile: most tiles need not look."""
    place = target + shift
    return tl.max(((place >= start) & (place < start + BLOCK)).to(tl.int32), axis=0) > 0


@jit
def _add_tile(
    row_ptr, class_weight_ptr, start, shift, end, target, target_logit,
    maximum, rest, spread, weighted, best, best_col,
    MASKED: tl.constexpr, POLICY: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SPREAD: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add a tile to the lanes' sums (see `sums`)."""
    places, mask = _places(start, shift, end, BLOCK_R, BLOCK_C)
    raw = _load(row_ptr[:, None, None] + places, mask, MASKED, POLICY)
    logits, _slope = transform(raw, ACC, SCALE, SOFTCAP)
    cols = places - shift
    if HAS_ARGMAX:
        value = raw.to(ACC) * (SCALE > 0) - raw.to(ACC) * (SCALE < 0)
        if MASKED:
            value = tl.where(mask, value, -float("inf"))
        tile_best = tl.max(value, axis=1)
        is_best = value == tile_best[:, None, :]
        tile_col = tl.min(tl.where(is_best, cols, 2147483647), axis=1)  # the first of equals
        best_col = tl.where(tile_best > best, tile_col, best_col)
        best = tl.maximum(best, tile_best)
    if HAS_SPREAD:
        difference = logits - target_logit[:, None, None]
        if class_weight_ptr is not None:
            difference *= tl.load(class_weight_ptr + cols, mask, other=0.0)
        if MASKED:
            difference = tl.where(mask, difference, 0.0)
        spread += tl.sum(difference, axis=1)
    if MASKED:
        logits = tl.where(mask, logits, -float("inf"))
    if _has_target(target, start, shift, BLOCK_R * BLOCK_C):
        logits = tl.where(cols == target[:, None, None], -float("inf"), logits)
    before = maximum
    maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    # As long as a lane has shown −inf only, its differences would be NaN.
    finite = tl.where(maximum == -float("inf"), 0.0, maximum)
    difference = logits - finite[:, None, :]
    shares = exp(difference, ACC)
    factor = exp(before - finite, ACC)
    if HAS_ENTROPY:
        moved = tl.where(rest > 0, rest * (before - finite), 0.0)
        weighted = factor * (weighted + moved)
        weighted += tl.sum(tl.where(shares > 0, shares * difference, 0.0), axis=1)
    rest = rest * factor + tl.sum(shares, axis=1)
    return maximum, rest, spread, weighted, best, best_col


@jit
def sums(
    row_ptr, class_weight_ptr, shift, end, target, target_logit,
    ALIGNS: tl.constexpr, POLICY: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SPREAD: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_ARGMAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return of each row what the loss and the statistics are made of.

    These are z*, Σ exp(z_v − z*) and Σ exp(z_v − z*) (z_v − z*) over v ≠ label, then over all v
    Σ c_v (z_v − z_label) and the argmax.
    """
    BLOCK: tl.constexpr = BLOCK_R * BLOCK_C
    # The smoothing sums differences to the target: an offset that all logits share cancels.
    shown = tl.where(target_logit == -float("inf"), 0.0, target_logit)
    zeros = tl.zeros([BLOCK_M, BLOCK_C], ACC)
    maximum, rest, spread, weighted = zeros + target_logit[:, None], zeros, zeros, zeros
    best = zeros - float("inf")
    best_col = tl.full([BLOCK_M, BLOCK_C], 2147483647, tl.int32)
    for PHASE in tl.static_range(0 if ALIGNS else 1, 3):
        begin, stop = _phase(PHASE, end, ALIGNS, BLOCK)
        for start in tl.range(begin, stop, BLOCK, num_stages=NUM_STAGES):
            maximum, rest, spread, weighted, best, best_col = _add_tile(
                row_ptr, class_weight_ptr, start, shift, end, target, shown,
                maximum, rest, spread, weighted, best, best_col,
                PHASE != 1, POLICY, ACC, SCALE, SOFTCAP, HAS_SPREAD, HAS_ENTROPY, HAS_ARGMAX,
                BLOCK_R, BLOCK_C,
            )  # fmt: skip
    row_maximum = tl.max(maximum, axis=1)
    finite = tl.where(row_maximum == -float("inf"), 0.0, row_maximum)[:, None]
    factor = exp(maximum - finite, ACC)
    moved = tl.where(rest > 0, rest * (maximum - finite), 0.0)
    weighted = tl.sum(factor * (weighted + moved), axis=1)
    first = tl.where(best == tl.max(best, axis=1)[:, None], best_col, 2147483647)
    argmax = tl.min(first, axis=1)
    argmax = tl.where(argmax == 2147483647, 0, argmax)  # nothing but −inf
    rest = tl.sum(rest * factor, axis=1)
    return row_maximum, rest, weighted, tl.sum(spread, axis=1), argmax


@jit
def _gradient_tile(
    row_ptr, gradient_row_ptr, class_weight_ptr, start, shift, end, target, is_counted, maximum,
    factor, target_gradient, pull,
    MASKED: tl.constexpr, KEEPS: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_PULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write exp(z_v − z*) · factor − pull · c_v, and at the label its own value."""
    POLICY: tl.constexpr = "evict_first" if KEEPS else ""
    places, mask = _places(start, shift, end, BLOCK_R, BLOCK_C)
    raw = _load(row_ptr[:, None, None] + places, mask, MASKED, POLICY)
    logits, slope = transform(raw, ACC, SCALE, SOFTCAP)
    cols = places - shift
    gradient = exp(logits - maximum[:, None, None], ACC) * factor[:, None, None]
    if _has_target(target, start, shift, BLOCK_R * BLOCK_C):
        is_target = cols == target[:, None, None]
        gradient = tl.where(is_target, target_gradient[:, None, None], gradient)
    if HAS_PULL:
        pulls = pull[:, None, None]
        if class_weight_ptr is not None:
            pulls = pulls * tl.load(class_weight_ptr + cols, mask, other=0.0)
        gradient -= pulls
    if SOFTCAP is not None:
        gradient *= slope
    if BLOCK_M > 1:  # not a product with 0: the logits of an ignored row may be NaN
        gradient = tl.where(is_counted[:, None, None], gradient, 0.0)
    pointers = gradient_row_ptr[:, None, None] + places
    gradient = gradient.to(gradient_row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(pointers, gradient, mask, eviction_policy=POLICY)
    else:
        tl.store(pointers, gradient, eviction_policy=POLICY)


@jit
def write_gradient(
    row_ptr, gradient_row_ptr, class_weight_ptr, shift, end, target, is_counted, maximum,
    factor, target_gradient, pull,
    ALIGNS: tl.constexpr, KEEPS: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows from the sums; see `_gradient_tile`."""
    BLOCK: tl.constexpr = BLOCK_R * BLOCK_C
    for PHASE in tl.static_range(0 if ALIGNS else 1, 3):
        begin, stop = _phase(PHASE, end, ALIGNS, BLOCK)
        for start in tl.range(begin, stop, BLOCK, num_stages=NUM_STAGES):
            _gradient_tile(
                row_ptr, gradient_row_ptr, class_weight_ptr, start, shift, end, target,
                is_counted, maximum, factor, target_gradient, pull,
                PHASE != 1, KEEPS, ACC, SCALE, SOFTCAP, HAS_PULL, BLOCK_M, BLOCK_R, BLOCK_C,
            )  # fmt: skip


@jit
def write_zeros(row_ptr, shift, end, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write the gradient of rows that do not count."""
    zeros = tl.zeros([1, BLOCK_R, BLOCK_C], row_ptr.dtype.element_ty)
    for start in range(0, end, BLOCK_R * BLOCK_C):
        places, mask = _places(start, shift, end, BLOCK_R, BLOCK_C)
        tl.store(row_ptr[:, None, None] + places, zeros, mask)

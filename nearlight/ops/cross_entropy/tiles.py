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
from nearlight.ops._logits import final_logits
from nearlight.ops._softmax import exp

# Tiles of rows that start anywhere are moved to multiples of so many elements, which are whole
# vectors of 16 bytes in any dtype.
ALIGNMENT: tl.constexpr = tl.constexpr(16)


@jit
def _places(start, shift, end, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a tile's places, counted from a row's aligned start, and which are of the row."""
    places = start + tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return places[None, :, :], ((places >= shift) & (places < end))[None, :, :]


@jit
def _phase(
    PHASE: tl.constexpr, end, ALIGNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Return where tiles begin and stop: the first where rows start anywhere, whole ones, the last.

    Only whole tiles go without a mask, which would cost them the width of their accesses.
    """
    # Else the second tile would begin before the row does, among the columns of others.
    tl.static_assert(BLOCK_C >= ALIGNMENT or not ALIGNS)
    first: tl.constexpr = BLOCK_C if ALIGNS else 0
    BLOCK: tl.constexpr = BLOCK_R * BLOCK_C
    full_end = tl.maximum((end - first) // BLOCK * BLOCK + first, first)
    if PHASE == 0:
        return 0, tl.minimum(end, first)
    elif PHASE == 1:
        return first, full_end
    else:
        return full_end, end


@jit
def _is_whole(places, shift, end):
    """Return which places are of a vector that lies in the row as a whole."""
    vectors = places // ALIGNMENT * ALIGNMENT
    return (vectors >= shift) & (vectors + ALIGNMENT <= end)


@jit
def _load(
    row_ptr, places, mask, shift, end,
    MASKED: tl.constexpr, ALIGNS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    pointers = row_ptr[:, None, None] + places
    if not MASKED:
        return tl.load(pointers, eviction_policy=POLICY)
    elif not ALIGNS:
        return tl.load(pointers, mask, other=0.0, eviction_policy=POLICY)
    else:  # element by element at the ends of the row alone
        is_whole = _is_whole(places, shift, end)
        inside = tl.load(pointers, is_whole, other=0.0, eviction_policy=POLICY)
        ends = tl.load(pointers, mask & (is_whole == 0), other=0.0, eviction_policy=POLICY)
        return tl.where(is_whole, inside, ends)


@jit
def _store(
    row_ptr, places, mask, shift, end, tile,
    MASKED: tl.constexpr, ALIGNS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    pointers = row_ptr[:, None, None] + places
    tile = tile.to(row_ptr.dtype.element_ty)
    if not MASKED:
        tl.store(pointers, tile, eviction_policy=POLICY)
    elif not ALIGNS:
        tl.store(pointers, tile, mask, eviction_policy=POLICY)
    else:
        is_whole = _is_whole(places, shift, end)
        tl.store(pointers, tile, is_whole, eviction_policy=POLICY)
        tl.store(pointers, tile, mask & (is_whole == 0), eviction_policy=POLICY)


@jit
def _has_target(target, start, shift, BLOCK: tl.constexpr):
    """Return whether the label of a row of the program lies in a tile: most tiles need not look."""
    place = target + shift
    return tl.max(((place >= start) & (place < start + BLOCK)).to(tl.int32), axis=0) > 0


@jit
def _add_tile(
    row_ptr, class_weight_ptr, start, shift, end, target, target_logit,
    maximum, rest, spread, weighted, best, best_col,
    MASKED: tl.constexpr, ALIGNS: tl.constexpr, POLICY: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SPREAD: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_ARGMAX: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add a tile to the lanes' sums (see `sums`)."""
    places, mask = _places(start, shift, end, BLOCK_R, BLOCK_C)
    raw = _load(row_ptr, places, mask, shift, end, MASKED, ALIGNS, POLICY)
    logits, _slope = final_logits(raw, ACC, SCALE, SOFTCAP)
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
    # Where tiles are moved, those at the ends of a row are small: they take many registers.
    ENDS_R: tl.constexpr = 1 if ALIGNS else BLOCK_R
    # The smoothing sums differences to the target: an offset that all logits share cancels.
    shown = tl.where(target_logit == -float("inf"), 0.0, target_logit)
    zeros = tl.zeros([BLOCK_M, BLOCK_C], ACC)
    maximum, rest, spread, weighted = zeros + target_logit[:, None], zeros, zeros, zeros
    best = zeros - float("inf")
    best_col = tl.full([BLOCK_M, BLOCK_C], 2147483647, tl.int32)
    for PHASE in tl.static_range(0 if ALIGNS else 1, 3):
        begin, stop = _phase(PHASE, end, ALIGNS, BLOCK_R, BLOCK_C)
        step = BLOCK_C * (BLOCK_R if PHASE == 1 else ENDS_R)
        for start in tl.range(begin, stop, step, num_stages=NUM_STAGES):
            maximum, rest, spread, weighted, best, best_col = _add_tile(
                row_ptr, class_weight_ptr, start, shift, end, target, shown,
                maximum, rest, spread, weighted, best, best_col,
                PHASE != 1, ALIGNS, POLICY, ACC, SCALE, SOFTCAP,
                HAS_SPREAD, HAS_ENTROPY, HAS_ARGMAX, BLOCK_R if PHASE == 1 else ENDS_R, BLOCK_C,
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
    MASKED: tl.constexpr, ALIGNS: tl.constexpr, KEEPS: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write exp(z_v − z*) · factor − pull · c_v, and at the label its own value."""
    POLICY: tl.constexpr = "evict_first" if KEEPS else ""
    places, mask = _places(start, shift, end, BLOCK_R, BLOCK_C)
    raw = _load(row_ptr, places, mask, shift, end, MASKED, ALIGNS, POLICY)
    logits, slope = final_logits(raw, ACC, SCALE, SOFTCAP)
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
    _store(gradient_row_ptr, places, mask, shift, end, gradient, MASKED, ALIGNS, POLICY)


@jit
def write_gradient(
    row_ptr, gradient_row_ptr, class_weight_ptr, shift, end, target, is_counted, maximum,
    factor, target_gradient, pull,
    ALIGNS: tl.constexpr, KEEPS: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PULL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows from the sums; see `_gradient_tile`.

    From the end on: what was read last for the sums is the nearest to have again.
    """
    ENDS_R: tl.constexpr = 1 if ALIGNS else BLOCK_R
    for BACK in tl.static_range(0, 3 if ALIGNS else 2):
        begin, stop = _phase(2 - BACK, end, ALIGNS, BLOCK_R, BLOCK_C)
        step = BLOCK_C * (BLOCK_R if BACK == 1 else ENDS_R)
        num_tiles = tl.cdiv(stop - begin, step)
        for tile in tl.range(0, num_tiles, num_stages=NUM_STAGES):
            _gradient_tile(
                row_ptr, gradient_row_ptr, class_weight_ptr,
                begin + (num_tiles - 1 - tile) * step, shift, end, target,
                is_counted, maximum, factor, target_gradient, pull,
                BACK != 1, ALIGNS, KEEPS, ACC, SCALE, SOFTCAP, HAS_PULL,
                BLOCK_M, BLOCK_R if BACK == 1 else ENDS_R, BLOCK_C,
            )  # fmt: skip


@jit
def write_zeros(
    row_ptr, shift, end, ALIGNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the gradient of rows that do not count."""
    ENDS_R: tl.constexpr = 1 if ALIGNS else BLOCK_R
    for PHASE in tl.static_range(0 if ALIGNS else 1, 3):
        begin, stop = _phase(PHASE, end, ALIGNS, BLOCK_R, BLOCK_C)
        for start in range(begin, stop, BLOCK_C * (BLOCK_R if PHASE == 1 else ENDS_R)):
            places, mask = _places(
                start, shift, end, BLOCK_R if PHASE == 1 else ENDS_R, BLOCK_C
            )  # fmt: skip
            zeros = tl.zeros(places.shape, row_ptr.dtype.element_ty)
            _store(row_ptr, places, mask, shift, end, zeros, PHASE != 1, ALIGNS, "")

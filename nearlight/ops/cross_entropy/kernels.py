"""The kernels of cross entropy: rows of logits to losses, statistics and their own gradient."""

# Triton evaluates annotations, so kernels have none but constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl

from nearlight.core.triton import jit
from nearlight.ops._logits import final_logits
from nearlight.ops.cross_entropy.tiles import (
    ALIGNMENT,
    sums,
    write_gradient,
    write_zeros,
)


@jit
def _read_labels(
    logits_ptr, labels_ptr, M, N, stride_m, ignore_index,
    ALIGNS: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return what a program knows of its rows before it reads them, the target's logit included."""
    # Rows beyond the last are the last once more: no tile needs a mask for them.
    rows = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), M - 1)
    label = tl.load(labels_ptr + rows)
    is_counted = label != ignore_index
    # A label outside is an error raised elsewhere; here it must not read outside the row.
    is_inside = is_counted & (label >= 0) & (label < N)
    target = tl.where(is_inside, label, -N - 64).to(tl.int32)
    row_ptr = logits_ptr + rows * stride_m
    raw = tl.load(row_ptr + label, is_inside, other=0.0)
    target_logit, _slope = final_logits(raw, ACC, SCALE, SOFTCAP)
    shift = tl.program_id(0) * 0
    if ALIGNS:  # rows that start anywhere: tiles do not
        shift = (tl.program_id(0).to(tl.int64) * stride_m % ALIGNMENT).to(tl.int32)
        row_ptr = logits_ptr + rows * stride_m // ALIGNMENT * ALIGNMENT
    any_counted = tl.max(is_counted.to(tl.int32), axis=0) > 0
    return rows, row_ptr, label, target, target_logit, is_counted, is_inside, any_counted, shift


@jit
def _weights(
    divisor_ptr, token_weight_ptr, class_weight_ptr, class_weight_sum_ptr, rows, label, is_inside,
    N, token_weight_stride, ACC: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the weights of the row, of −log p(label), and Σ c_v / V times the smoothing."""
    row_weight = tl.full([BLOCK_M], 1.0, ACC)
    if token_weight_ptr is not None:
        row_weight *= tl.load(token_weight_ptr + rows * token_weight_stride).to(ACC)
    if divisor_ptr is not None:  # 0 (all rows ignored) makes the loss 0 instead of NaN
        divisor = tl.load(divisor_ptr).to(ACC)
        row_weight *= tl.where(divisor != 0, 1.0 / divisor, 0.0)
    target_weight = tl.full([BLOCK_M], 1.0 - SMOOTHING, ACC)
    uniform = tl.full([BLOCK_M], SMOOTHING, ACC) / N
    weight_sum = tl.zeros([BLOCK_M], ACC) + N
    if class_weight_ptr is not None:
        target_weight *= tl.load(class_weight_ptr + label, is_inside, other=0.0)
        if SMOOTHING > 0:
            weight_sum = tl.zeros([BLOCK_M], ACC) + tl.load(class_weight_sum_ptr)
    return row_weight, target_weight, uniform, uniform * weight_sum


@jit
def _losses(
    maximum, rest, spread, target_logit, target_weight, uniform, smoothing_weight,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Return the loss of each row, its log Σ exp(z_v), and log Σ exp(z_v − z*)."""
    # The target is kept out of the sum of the rest: of a confident row, loss and gradient are
    # made of the rest alone, and 1 − p would cancel all its digits.
    total = tl.exp(target_logit - maximum) + rest
    log_total = tl.log(total)
    excess = total - 1.0
    log1p_rest = tl.where(excess == 0.0, rest, log_total * (rest / excess))
    log_total = tl.where(target_logit == maximum, log1p_rest, log_total)
    target_loss = log_total - (target_logit - maximum)
    loss = target_weight * target_loss
    if SMOOTHING > 0:
        loss += smoothing_weight * target_loss - uniform * spread
    log_sum_exp = maximum + log_total
    if Z_LOSS > 0:
        loss += Z_LOSS * log_sum_exp * log_sum_exp
    return loss, log_sum_exp, log_total


@jit
def _gradients(
    row_ptr, gradient_ptr, class_weight_ptr, rows, shift, N, gradient_stride_m, target, is_counted,
    any_counted, maximum, rest, target_logit, row_weight, target_weight, uniform, smoothing_weight,
    ALIGNS: tl.constexpr, KEEPS: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows, from what was summed of them."""
    target_share = tl.exp(target_logit - maximum)
    total = target_share + rest
    slope = smoothing_weight
    if Z_LOSS > 0:
        slope += 2.0 * Z_LOSS * (maximum + tl.log(total))
    scale = row_weight * SCALE
    target_gradient = scale * (target_share * slope - target_weight * rest) / total
    factor = scale * (slope + target_weight) / total
    gradient_start = rows * gradient_stride_m
    if ALIGNS:
        gradient_start = gradient_start // ALIGNMENT * ALIGNMENT
    if any_counted:
        write_gradient(
            row_ptr, gradient_ptr + gradient_start, class_weight_ptr, shift, N + shift, target,
            is_counted, maximum, factor, target_gradient, scale * uniform,
            ALIGNS, KEEPS, NUM_STAGES, ACC, SCALE, SOFTCAP, SMOOTHING > 0,
            BLOCK_M, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        write_zeros(gradient_ptr + gradient_start, shift, N + shift, ALIGNS, BLOCK_R, BLOCK_C)


@jit
def _cross_entropy_fwd_kernel(
    logits_ptr,  # (M, N), rows `stride_m` apart
    gradient_ptr,  # (M, N), rows `gradient_stride_m` apart; the logits themselves; or None
    labels_ptr,  # (M,)
    divisor_ptr, token_weight_ptr, class_weight_ptr, class_weight_sum_ptr,
    loss_ptr,  # (M,)
    statistics_ptr,  # (2, M): z* and Σ exp(z_v − z*) over v ≠ label; or None
    log_sum_exp_ptr, argmax_ptr, entropy_ptr,  # (M,) each, or None
    M, N, stride_m, gradient_stride_m, token_weight_stride, ignore_index,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr, ALIGNS: tl.constexpr, KEEPS: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, row_ptr, label, target, target_logit, is_counted, is_inside, any_counted, shift = (
        _read_labels(
            logits_ptr, labels_ptr, M, N, stride_m, ignore_index,
            ALIGNS, ACC, SCALE, SOFTCAP, BLOCK_M,
        )
    )  # fmt: skip
    row_weight, target_weight, uniform, smoothing_weight = _weights(
        divisor_ptr, token_weight_ptr, class_weight_ptr, class_weight_sum_ptr, rows, label,
        is_inside, N, token_weight_stride, ACC, SMOOTHING, BLOCK_M,
    )  # fmt: skip
    KEPT: tl.constexpr = "evict_first" if gradient_ptr is None else "evict_last"
    maximum, rest, weighted, spread, argmax = sums(
        row_ptr, class_weight_ptr, shift,
        tl.where(any_counted, N + shift, 0),  # of a row that does not count nothing is read
        target, target_logit,
        ALIGNS, KEPT if KEEPS else "", NUM_STAGES, ACC, SCALE, SOFTCAP, SMOOTHING > 0,
        entropy_ptr is not None, argmax_ptr is not None, BLOCK_M, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    loss, log_sum_exp, log_total = _losses(
        maximum, rest, spread, target_logit, target_weight, uniform, smoothing_weight,
        SMOOTHING, Z_LOSS,
    )  # fmt: skip
    tl.store(loss_ptr + rows, tl.where(is_counted, loss * row_weight, 0.0))
    if statistics_ptr is not None:
        tl.store(statistics_ptr + rows, maximum)
        tl.store(statistics_ptr + tl.zeros([BLOCK_M], tl.int64) + M + rows, rest)
    if log_sum_exp_ptr is not None:
        tl.store(log_sum_exp_ptr + rows, tl.where(is_counted, log_sum_exp, 0.0))
    if argmax_ptr is not None:
        tl.store(argmax_ptr + rows, tl.where(is_counted, argmax, -1).to(tl.int64))
    if entropy_ptr is not None:
        below = target_logit - maximum
        share = tl.exp(below)
        weighted += tl.where(share > 0, share * below, 0.0)
        entropy = log_total - weighted / (share + rest)
        tl.store(entropy_ptr + rows, tl.where(is_counted, entropy, 0.0))
    if gradient_ptr is not None:
        # The gradient may take the place of the logits: every warp must have read the target.
        tl.debug_barrier()
        _gradients(
            row_ptr, gradient_ptr, class_weight_ptr, rows, shift, N, gradient_stride_m, target,
            is_counted, any_counted, maximum, rest, target_logit, row_weight, target_weight,
            uniform, smoothing_weight, ALIGNS, KEEPS, NUM_STAGES, ACC, SCALE, SOFTCAP, SMOOTHING,
            Z_LOSS, BLOCK_M, BLOCK_R, BLOCK_C,
        )  # fmt: skip


@jit
def _cross_entropy_bwd_kernel(
    upstream_ptr,  # rows `upstream_stride` apart; 0 for a scalar loss
    logits_ptr, gradient_ptr, labels_ptr, divisor_ptr, token_weight_ptr, class_weight_ptr,
    class_weight_sum_ptr, statistics_ptr,  # as the forward took and wrote them
    M, N, stride_m, gradient_stride_m, token_weight_stride, upstream_stride, ignore_index,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr, ALIGNS: tl.constexpr, KEEPS: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, row_ptr, label, target, target_logit, is_counted, is_inside, any_counted, shift = (
        _read_labels(
            logits_ptr, labels_ptr, M, N, stride_m, ignore_index,
            ALIGNS, ACC, SCALE, SOFTCAP, BLOCK_M,
        )
    )  # fmt: skip
    row_weight, target_weight, uniform, smoothing_weight = _weights(
        divisor_ptr, token_weight_ptr, class_weight_ptr, class_weight_sum_ptr, rows, label,
        is_inside, N, token_weight_stride, ACC, SMOOTHING, BLOCK_M,
    )  # fmt: skip
    row_weight *= tl.load(upstream_ptr + rows * upstream_stride).to(ACC)
    maximum = tl.load(statistics_ptr + rows)
    rest = tl.load(statistics_ptr + tl.zeros([BLOCK_M], tl.int64) + M + rows)
    _gradients(
        row_ptr, gradient_ptr, class_weight_ptr, rows, shift, N, gradient_stride_m, target,
        is_counted, any_counted, maximum, rest, target_logit, row_weight, target_weight, uniform,
        smoothing_weight, ALIGNS, KEEPS, NUM_STAGES, ACC, SCALE, SOFTCAP, SMOOTHING, Z_LOSS,
        BLOCK_M, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@jit
def _divisor_kernel(
    labels_ptr, token_weight_ptr, class_weight_ptr,
    divisor_ptr,  # (programs,): Σ c_label · t over the rows that count; or None
    is_allowed_ptr,  # (programs,): whether every label is one
    M, N, token_weight_stride, ignore_index,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    total = tl.zeros([BLOCK], ACC)
    is_wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(first, tl.minimum(first + ROWS, M), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + rows, rows < M, other=ignore_index)
        is_counted = label != ignore_index
        is_inside = (label >= 0) & (label < N)
        is_wrong = is_wrong | (is_counted & (is_inside == 0)).to(tl.int32)
        if divisor_ptr is not None:
            weight = is_counted.to(ACC)
            if class_weight_ptr is not None:
                weight *= tl.load(class_weight_ptr + label, is_counted & is_inside, other=0.0)
            if token_weight_ptr is not None:
                token_weight_row_ptr = token_weight_ptr + rows * token_weight_stride
                weight *= tl.load(token_weight_row_ptr, is_counted & (rows < M), other=0.0).to(ACC)
            total += weight
    if divisor_ptr is not None:
        tl.store(divisor_ptr + tl.program_id(0), tl.sum(total, axis=0))
    tl.store(is_allowed_ptr + tl.program_id(0), tl.max(is_wrong, axis=0) == 0)


@jit
def _scale_kernel(
    in_ptr, out_ptr, factor_ptr, num_elements,
    ACC: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr).to(ACC)
    # The usual upstream gradient of a loss is 1: nothing to do, and the host need not wait to know.
    end = num_elements
    if IN_PLACE:
        end = tl.where(factor == 1.0, 0, end)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, end, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        scaled = tl.load(in_ptr + offsets, mask, other=0.0).to(ACC) * factor
        tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask)

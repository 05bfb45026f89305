"""The kernels of linear cross entropy, each with its launcher: tensors in, tensors changed.

The loss kernel knows nothing of matrix products: it turns rows of logits into their losses and,
where asked, into the gradient of the logits in the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
from nearlight.core.rows import FEW_COLUMNS, accumulator, triton_accumulator
from nearlight.core.triton import jit
from nearlight.ops._logits import flat_block, load_tile, target_terms, transform, tunable_config

config = tunable_config("linear_cross_entropy")
SCALE_BLOCK = 8192  # elements of a program


@dataclass(frozen=True)
class LossOptions:
    """What the loss of a row is made of; the public function's docstring explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


@jit
def _sums(
    row_ptr, row_mask, label, target, class_weight_ptr, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SPREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum z*, Σ exp(z_v − z*) over v ≠ label, and Σ c_v (z_v − z_label)."""
    # The smoothing sums differences to the target: an offset that all logits share cancels.
    shift = tl.where(target == -float("inf"), 0.0, target)
    maximum = target
    rest = tl.zeros([BLOCK_M], ACC)
    spread = tl.zeros([BLOCK_M], ACC)
    for start in range(0, N, BLOCK_N):
        cols, _pointers, _access, mask, logits, _cap_slope = load_tile(
            row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, BLOCK_N
        )
        if HAS_SPREAD:
            difference = tl.where(mask, logits - shift[:, None], 0.0)
            if class_weight_ptr is not None:
                class_weight = tl.load(class_weight_ptr + cols, cols < N, other=0.0)
                difference = difference * class_weight[None, :]
            spread += tl.sum(difference, axis=1)
        logits = tl.where(cols[None, :] == label[:, None], -float("inf"), logits)
        before = maximum
        maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        # As long as a row has shown −inf only, its differences would be NaN.
        finite = tl.where(maximum == -float("inf"), 0.0, maximum)
        rest = rest * tl.exp(before - finite) + tl.sum(tl.exp(logits - finite[:, None]), axis=1)
    return maximum, rest, spread


@jit
def _write_gradient(
    row_ptr, row_mask, label, is_counted, maximum, factor, target_gradient, pull,
    class_weight_ptr, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PULL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write exp(z_v − z*) · factor − pull · c_v, the target's own value, 0 for ignored rows."""
    for start in range(0, N, BLOCK_N):
        cols, pointers, access, _mask, logits, cap_slope = load_tile(
            row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, BLOCK_N
        )
        gradient = tl.exp(logits - maximum[:, None]) * factor[:, None]
        is_target = cols[None, :] == label[:, None]
        gradient = tl.where(is_target, target_gradient[:, None], gradient)
        if HAS_PULL:
            pulls = pull[:, None]
            if class_weight_ptr is not None:
                class_weight = tl.load(class_weight_ptr + cols, cols < N, other=0.0)
                pulls = pulls * class_weight[None, :]
            gradient -= pulls
        if SOFTCAP is not None:
            gradient *= cap_slope
        # Not a product with 0: the logits of an ignored row may be NaN.
        gradient = tl.where(is_counted[:, None], gradient, 0.0)
        tl.store(pointers, gradient.to(row_ptr.dtype.element_ty), access)


@jit
def _cross_entropy_kernel(
    logits_ptr, loss_ptr, labels_ptr, row_weight_ptr, class_weight_ptr, class_weight_sum_ptr,
    M, N, logits_stride_m, row_weight_stride_m, ignore_index,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, WRITE_GRADIENT: tl.constexpr,
    HAS_PADDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A mask that ends inside 16 columns would cost every access its vector width.
    width = (N + 15) // 16 * 16 if HAS_PADDING else N
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    row_ptr = logits_ptr + rows * logits_stride_m
    label = tl.load(labels_ptr + rows, row_mask, other=ignore_index)
    is_counted = label != ignore_index
    # A label outside is an error raised elsewhere; here it must not read outside the row.
    target_mask = is_counted & (label >= 0) & (label < N)
    raw = tl.load(row_ptr + label, target_mask, other=0.0)
    target, _cap_slope = transform(raw, target_mask, ACC, SCALE, SOFTCAP)
    row_weight = tl.load(row_weight_ptr + rows * row_weight_stride_m, row_mask, other=0.0)
    target_weight = tl.full([BLOCK_M], 1.0 - SMOOTHING, ACC)
    weight_sum = tl.zeros([BLOCK_M], ACC) + N
    if class_weight_ptr is not None:
        target_weight *= tl.load(class_weight_ptr + label, target_mask, other=0.0)
        weight_sum = tl.zeros([BLOCK_M], ACC) + tl.load(class_weight_sum_ptr)
    uniform = tl.full([BLOCK_M], SMOOTHING, ACC) / N

    maximum, rest, spread = _sums(
        row_ptr, row_mask, label, target, class_weight_ptr, N, width,
        ACC, SCALE, SOFTCAP, SMOOTHING > 0, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    target_share, total, log_total, target_loss = target_terms(target, maximum, rest)
    loss = target_weight * target_loss
    slope = tl.zeros([BLOCK_M], ACC)
    if SMOOTHING > 0:
        loss += uniform * (weight_sum * target_loss - spread)
        slope += uniform * weight_sum
    if Z_LOSS > 0:
        log_sum_exp = maximum + log_total
        loss += Z_LOSS * log_sum_exp * log_sum_exp
        slope += 2.0 * Z_LOSS * log_sum_exp
    tl.store(loss_ptr + rows, tl.where(is_counted, loss * row_weight, 0.0), row_mask)

    if WRITE_GRADIENT:
        # The gradient takes the place of the logits: every warp must have read the target.
        tl.debug_barrier()
        scale = row_weight * SCALE
        target_gradient = scale * (target_share * slope - target_weight * rest) / total
        factor = scale * (slope + target_weight) / total
        _write_gradient(
            row_ptr, row_mask, label, is_counted, maximum, factor, target_gradient,
            scale * uniform, class_weight_ptr, N, width,
            ACC, SCALE, SOFTCAP, SMOOTHING > 0, BLOCK_N,
        )  # fmt: skip


def cross_entropy_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_weight: torch.Tensor,
    options: LossOptions,
    class_weight: torch.Tensor | None = None,
    class_weight_sum: torch.Tensor | None = None,
    write_gradient: bool = True,
    has_padding: bool = False,
) -> torch.Tensor:
    """Return the loss of each row and turn the logits into their gradient, in place.

    Reads the logits twice (the second time from L2) and writes them once; without a gradient it
    reads them once and writes nothing.

    Args:
        logits: (M, N), unit column stride, any row stride; holds the gradient afterwards.
        labels: (M,) int64, contiguous, in [0, N) or `options.ignore_index`.
        row_weight: (M,) in accumulator dtype, any stride; multiplies loss and gradient.
        options: what the loss is made of.
        class_weight: (N,) in accumulator dtype, contiguous, or None for ones.
        class_weight_sum: () its sum; required where `class_weight` is given.
        write_gradient: False leaves the logits as they are.
        has_padding: every row, the last one too, is followed by memory of no meaning up to the
            next multiple of 16 columns, which may be read and written.

    Returns:
        (M,) in accumulator dtype (fp32, or fp64 for fp64 logits); 0 for ignored rows.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 or vocab == 1
    assert labels.is_contiguous() and (class_weight is None) == (class_weight_sum is None)
    loss = torch.empty(rows, dtype=accumulator(logits.dtype), device=logits.device)
    if rows == 0:
        return loss
    gpu, has_softcap = launch_gpu(logits.device), options.softcap is not None
    tile = config((rows, vocab), logits.dtype, gpu, has_softcap)
    _cross_entropy_kernel[(triton.cdiv(rows, tile.block_m),)](
        logits,
        loss,
        labels,
        row_weight,
        class_weight,
        class_weight_sum,
        rows,
        vocab,
        logits.stride(0),
        row_weight.stride(0),
        options.ignore_index,
        ACC=triton_accumulator(logits.dtype),
        # Constants of a training run; as arguments they would be rounded to fp32.
        SCALE=float(options.logit_scale),
        SOFTCAP=None if options.softcap is None else float(options.softcap),
        SMOOTHING=float(options.label_smoothing),
        Z_LOSS=float(options.z_loss),
        WRITE_GRADIENT=write_gradient,
        HAS_PADDING=has_padding and vocab % 16 != 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        # The gradient of a single class is exactly zero, without the noise of one rounding less.
        enable_fp_fusion=vocab > FEW_COLUMNS,
    )
    return loss


@jit
def _scale_kernel(tensor_ptr, factor_ptr, N, ACC: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    # The usual upstream gradient of a loss: nothing to do, and the host need not wait to know.
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < N
        scaled = tl.load(tensor_ptr + offsets, mask, other=0.0).to(ACC) * factor
        tl.store(tensor_ptr + offsets, scaled.to(tensor_ptr.dtype.element_ty), mask)


def scale_(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a contiguous tensor by a 0-d tensor, in place, without reading it on the host."""
    if tensor.numel() == 0:
        return
    block = flat_block(tensor, SCALE_BLOCK)
    _scale_kernel[(triton.cdiv(tensor.numel(), block),)](
        tensor,
        factor,
        tensor.numel(),
        ACC=triton_accumulator(tensor.dtype),
        BLOCK=block,
        num_warps=8,
    )

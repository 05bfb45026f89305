"""The kernel of divergences between two models' rows of logits, with its launcher.

It knows nothing of matrix products: it turns rows of the student's and the teacher's logits into
their divergences and, where asked, the student's logits into their own gradient in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
from nearlight.core.rows import FEW_COLUMNS, triton_accumulator
from nearlight.core.triton import jit
from nearlight.ops._logits import load_tile, tunable_config

# With 2048 columns some spill a register or two (Triton 3.7.1).
config = tunable_config("linear_kl_div", capped_block=1024)


@dataclass(frozen=True)
class Options:
    """What the divergence is made of; the public functions' docstrings explain each."""

    beta: float = 0.0
    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0


@jit
def _load_both(
    row_ptr, other_ptr, row_mask, start, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a tile's pointers, what may be accessed, both final logits, the student's slope."""
    _cols, pointers, access, _mask, logits, cap_slope = load_tile(
        row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, BLOCK_N
    )
    _others, _reach, _inside, _exists, others, _slope = load_tile(
        other_ptr, row_mask, start, N, width, ACC, TEACHER_SCALE, TEACHER_SOFTCAP, BLOCK_N
    )
    return pointers, access, logits * COLDNESS, others * COLDNESS, cap_slope


@jit
def _added(maximum, total, logits):
    """Return the maximum z* and Σ exp(z − z*) with a tile's logits taken in."""
    before = maximum
    maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    # As long as a row has shown −inf only, its differences would be NaN.
    finite = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = total * tl.exp(before - finite) + tl.sum(tl.exp(logits - finite[:, None]), axis=1)
    return maximum, total


@jit
def _terms(log_q, log_p, BETA: tl.constexpr):
    """Return each class's part of the divergence, its slope r, p and q.

    The gradient of the logits is q − p for β = 0, else q (r − Σ q r). A class that is impossible
    has no part; one that is possible on the weighing side alone makes a KL infinite, also where
    its probability underflows.
    """
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    ratio = log_p - log_q
    nothing: tl.constexpr = -float("inf")
    if BETA == 0.0:
        part = tl.where(log_q == nothing, float("inf"), p * ratio)
        part = tl.where(log_p == nothing, 0.0, part)
        slope = ratio
    elif BETA == 1.0:
        part = tl.where(log_p == nothing, float("inf"), -q * ratio)
        part = tl.where(log_q == nothing, 0.0, part)
        slope = tl.where(q == 0.0, 0.0, -ratio)
    else:
        # From the ratio, not from log m, which would be rounded at the size of log p.
        fainter = tl.exp(-tl.abs(ratio))
        mixed = tl.where(ratio > 0, BETA + (1.0 - BETA) * fainter, (1.0 - BETA) + BETA * fainter)
        log_mixed = tl.log(mixed)  # log m less the larger of log p and log q
        of_p = tl.where(p == 0.0, 0.0, p * (tl.minimum(ratio, 0.0) - log_mixed))
        slope = (BETA - 1.0) * (tl.maximum(ratio, 0.0) + log_mixed)
        slope = tl.where(q == 0.0, 0.0, slope)
        part = BETA * of_p + q * slope
    return part, slope, p, q


@jit
def _write_gradient(
    row_ptr, other_ptr, row_mask, is_counted, scale, pivot, mean_slope,
    maximum, log_total, teacher_maximum, teacher_log_total, N, width,
    ACC: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the student's logits over them, 0 for ignored rows."""
    for start in range(0, N, BLOCK_N):
        pointers, access, logits, others, cap_slope = _load_both(
            row_ptr, other_ptr, row_mask, start, N, width,
            ACC, SCALE, SOFTCAP, TEACHER_SCALE, TEACHER_SOFTCAP, COLDNESS, BLOCK_N,
        )  # fmt: skip
        log_q = (logits - maximum[:, None]) - log_total[:, None]
        log_p = (others - teacher_maximum[:, None]) - teacher_log_total[:, None]
        _part, slope, p, q = _terms(log_q, log_p, BETA)
        # Slopes are taken from the top class's: where that has nearly all, r − Σ q r cancels.
        if BETA == 0.0:
            gradient = q - p
        else:
            gradient = q * ((slope - pivot[:, None]) - mean_slope[:, None])
        gradient = gradient * scale[:, None]
        if SOFTCAP is not None:
            gradient *= cap_slope
        # Not a product with 0: the logits of an ignored row may be NaN.
        gradient = tl.where(is_counted[:, None], gradient, 0.0)
        tl.store(pointers, gradient.to(row_ptr.dtype.element_ty), access)


@jit
def _divergence_kernel(
    logits_ptr, teacher_ptr, loss_ptr, labels_ptr, row_weight_ptr,
    M, N, logits_stride_m, teacher_stride_m, row_weight_stride_m, ignore_index,
    ACC: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr, HAS_PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A mask that ends inside 16 columns would cost every access its vector width.
    width = (N + 15) // 16 * 16 if HAS_PADDING else N
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    row_ptr = logits_ptr + rows * logits_stride_m
    other_ptr = teacher_ptr + rows * teacher_stride_m
    is_counted = tl.load(labels_ptr + rows, row_mask, other=ignore_index) != ignore_index
    row_weight = tl.load(row_weight_ptr + rows * row_weight_stride_m, row_mask, other=0.0)
    maximum = tl.full([BLOCK_M], -float("inf"), ACC)
    teacher_maximum = tl.full([BLOCK_M], -float("inf"), ACC)
    top = tl.full([BLOCK_M], -float("inf"), ACC)  # the teacher's logit of the student's top class
    total = tl.zeros([BLOCK_M], ACC)
    teacher_total = tl.zeros([BLOCK_M], ACC)
    for start in range(0, N, BLOCK_N):
        _pointers, _access, logits, others, _slope = _load_both(
            row_ptr, other_ptr, row_mask, start, N, width,
            ACC, SCALE, SOFTCAP, TEACHER_SCALE, TEACHER_SOFTCAP, COLDNESS, BLOCK_N,
        )  # fmt: skip
        before = maximum
        maximum, total = _added(maximum, total, logits)
        teacher_maximum, teacher_total = _added(teacher_maximum, teacher_total, others)
        if BETA != 0.0:
            of_top = tl.where(logits == maximum[:, None], others, -float("inf"))
            top = tl.where(maximum > before, tl.max(of_top, axis=1), top)
    log_total = tl.log(total)
    teacher_log_total = tl.log(teacher_total)
    top = (top - teacher_maximum) - teacher_log_total
    _top_part, pivot, _top_p, _top_q = _terms(-log_total, top, BETA)
    pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)
    loss = tl.zeros([BLOCK_M], ACC)
    mean_slope = tl.zeros([BLOCK_M], ACC)
    for start in range(0, N, BLOCK_N):
        _pointers, _access, logits, others, _slope = _load_both(
            row_ptr, other_ptr, row_mask, start, N, width,
            ACC, SCALE, SOFTCAP, TEACHER_SCALE, TEACHER_SOFTCAP, COLDNESS, BLOCK_N,
        )  # fmt: skip
        log_q = (logits - maximum[:, None]) - log_total[:, None]
        log_p = (others - teacher_maximum[:, None]) - teacher_log_total[:, None]
        part, slope, _p, q = _terms(log_q, log_p, BETA)
        loss += tl.sum(part, axis=1)
        if BETA != 0.0:
            mean_slope += tl.sum(q * (slope - pivot[:, None]), axis=1)
    tl.store(loss_ptr + rows, tl.where(is_counted, loss * row_weight, 0.0), row_mask)
    if WRITE_GRADIENT:
        # The gradient takes the place of the logits: every warp must have read them.
        tl.debug_barrier()
        _write_gradient(
            row_ptr, other_ptr, row_mask, is_counted, row_weight * (SCALE * COLDNESS), pivot,
            mean_slope, maximum, log_total, teacher_maximum, teacher_log_total, N, width,
            ACC, BETA, SCALE, SOFTCAP, TEACHER_SCALE, TEACHER_SOFTCAP, COLDNESS, BLOCK_N,
        )  # fmt: skip


def divergence_(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    row_weight: torch.Tensor,
    loss: torch.Tensor,
    options: Options,
    write_gradient: bool = True,
) -> None:
    """Write the divergence of each row and turn the student's logits into their gradient, in place.

    Args:
        logits: (M, N), the student's, unit column stride, any row stride; every row, the last one
            too, is followed by memory of no meaning up to the next multiple of 16 columns, which
            may be read and written. Holds the gradient afterwards.
        teacher: (M, N), likewise; stays.
        labels: (M,) int64, contiguous; rows of `options.ignore_index` give 0.
        row_weight: (M,) in accumulator dtype, any stride; multiplies loss and gradient.
        loss: (M,) in accumulator dtype, contiguous; written.
        options: what the divergence is made of.
        write_gradient: False leaves the logits as they are.
    """
    rows, vocab = logits.shape
    assert (logits.stride(1) == 1 == teacher.stride(1)) or vocab == 1
    assert labels.is_contiguous() and loss.is_contiguous()
    # Two models' tiles take at least the registers of one tile with a softcap.
    tile = config((rows, vocab), logits.dtype, launch_gpu(logits.device), True)
    _divergence_kernel[(triton.cdiv(rows, tile.block_m),)](
        logits,
        teacher,
        loss,
        labels,
        row_weight,
        rows,
        vocab,
        logits.stride(0),
        teacher.stride(0),
        row_weight.stride(0),
        options.ignore_index,
        ACC=triton_accumulator(logits.dtype),
        # Constants of a training run; as arguments they would be rounded to fp32.
        BETA=float(options.beta),
        SCALE=float(options.logit_scale),
        SOFTCAP=None if options.softcap is None else float(options.softcap),
        TEACHER_SCALE=float(options.teacher_logit_scale),
        TEACHER_SOFTCAP=None if options.teacher_softcap is None else float(options.teacher_softcap),
        COLDNESS=1.0 / options.temperature,
        WRITE_GRADIENT=write_gradient,
        HAS_PADDING=vocab % 16 != 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        enable_fp_fusion=vocab > FEW_COLUMNS,
    )

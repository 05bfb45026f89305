"""The kernels of linear log prob, each with its launcher: rows of logits in, gradients in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nearlight.core.launch import launch_gpu
from nearlight.core.rows import FEW_COLUMNS, triton_accumulator
from nearlight.core.triton import jit
from nearlight.ops._logits import load_tile, target_terms, transform, tunable_config

# With 4096 columns some forwards spill a register or two (Triton 3.6.0 and 3.7.1), also on sm_90.
config = tunable_config("linear_log_prob", capped_block=2048)

Statistics = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Options:
    """How logits become final; the public function's docstring explains each."""

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0


@jit
def _load_logits(
    row_ptr, row_mask, start, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols, pointers, access, _mask, logits, cap_slope = load_tile(
        row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, BLOCK_N
    )
    if COLDNESS != 1.0:
        logits = logits * COLDNESS
    return cols, pointers, access, logits, cap_slope


@jit
def _sums(
    row_ptr, row_mask, label, target, N, width,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum z*; over v ≠ label, Σ exp(z_v − z*) and Σ exp(z_v − z*) (z_v − z*)."""
    maximum = target
    rest = tl.zeros([BLOCK_M], ACC)
    drift = tl.zeros([BLOCK_M], ACC)
    for start in range(0, N, BLOCK_N):
        cols, _pointers, _access, logits, _cap_slope = _load_logits(
            row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, COLDNESS, BLOCK_N
        )
        logits = tl.where(cols[None, :] == label[:, None], -float("inf"), logits)
        before = maximum
        maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        # As long as a row has shown −inf only, its differences would be NaN.
        finite = tl.where(maximum == -float("inf"), 0.0, maximum)
        decay = tl.exp(before - finite)
        differences = logits - finite[:, None]
        shares = tl.exp(differences)
        if HAS_ENTROPY:
            # What has no share has no part in the sum, at a distance of −inf either.
            moved = tl.where(rest == 0.0, 0.0, (before - finite) * rest)
            parts = tl.where(shares == 0.0, 0.0, shares * differences)
            drift = decay * (drift + moved) + tl.sum(parts, axis=1)
        rest = rest * decay + tl.sum(shares, axis=1)
    return maximum, rest, drift


@jit
def _log_prob_fwd_kernel(
    logits_ptr, labels_ptr, maximum_ptr, log_total_ptr, log_prob_ptr, entropy_ptr,
    M, N, logits_stride_m, ignore_index,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
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
    if COLDNESS != 1.0:
        target = target * COLDNESS

    maximum, rest, drift = _sums(
        row_ptr, row_mask, label, target, N, width,
        ACC, SCALE, SOFTCAP, COLDNESS, entropy_ptr is not None, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    target_share, total, log_total, target_loss = target_terms(target, maximum, rest)
    log_total = tl.where(target == maximum, target_loss, log_total)
    tl.store(maximum_ptr + rows, maximum, row_mask)
    tl.store(log_total_ptr + rows, log_total, row_mask)
    tl.store(log_prob_ptr + rows, tl.where(is_counted, -target_loss, 0.0), row_mask)
    if entropy_ptr is not None:
        own = tl.where(target_share == 0.0, 0.0, target_share * (target - maximum))
        # Both terms are positive: a confident row keeps its digits.
        entropy = log_total - (drift + own) / total
        tl.store(entropy_ptr + rows, tl.where(is_counted, entropy, 0.0), row_mask)


@jit
def _one_minus_exp(log_p):
    """Return 1 − p for log p ≤ 0: of a p near 1 the difference would cancel all its digits."""
    p = tl.exp(log_p)
    less = p - 1.0
    expm1 = tl.where(less == -1.0, -1.0, less * (log_p / tl.log(p)))
    return -tl.where(less == 0.0, log_p, expm1)


@jit
def _log_prob_bwd_kernel(
    logits_ptr, labels_ptr, maximum_ptr, log_total_ptr, log_prob_ptr, entropy_ptr,
    grad_log_prob_ptr, grad_entropy_ptr,
    M, N, logits_stride_m, ignore_index,
    ACC: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, COLDNESS: tl.constexpr,
    HAS_PADDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    width = (N + 15) // 16 * 16 if HAS_PADDING else N
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    row_ptr = logits_ptr + rows * logits_stride_m
    label = tl.load(labels_ptr + rows, row_mask, other=ignore_index)
    is_counted = label != ignore_index
    maximum = tl.load(maximum_ptr + rows, row_mask, other=0.0)
    log_total = tl.load(log_total_ptr + rows, row_mask, other=0.0)
    scale = tl.full([BLOCK_M], SCALE * COLDNESS, ACC)
    if grad_log_prob_ptr is not None:
        upstream = scale * tl.load(grad_log_prob_ptr + rows, row_mask, other=0.0)
        log_prob = tl.load(log_prob_ptr + rows, row_mask, other=0.0)
        target_gradient = upstream * _one_minus_exp(log_prob)
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + rows, row_mask, other=0.0)
        entropy_scale = scale * tl.load(grad_entropy_ptr + rows, row_mask, other=0.0)
    for start in range(0, N, BLOCK_N):
        cols, pointers, access, logits, cap_slope = _load_logits(
            row_ptr, row_mask, start, N, width, ACC, SCALE, SOFTCAP, COLDNESS, BLOCK_N
        )
        log_p = logits - maximum[:, None] - log_total[:, None]
        p = tl.exp(log_p)
        gradient = tl.zeros_like(p)
        if grad_log_prob_ptr is not None:
            is_target = cols[None, :] == label[:, None]
            gradient = tl.where(is_target, target_gradient[:, None], -upstream[:, None] * p)
        if grad_entropy_ptr is not None:
            # 0 · −inf is 0 here.
            pull = tl.where(p == 0.0, 0.0, p * (log_p + entropy[:, None]))
            gradient -= entropy_scale[:, None] * pull
        if SOFTCAP is not None:
            gradient *= cap_slope
        # Not a product with 0: the logits of an ignored row may be NaN.
        gradient = tl.where(is_counted[:, None], gradient, 0.0)
        tl.store(pointers, gradient.to(logits_ptr.dtype.element_ty), access)


def _constants(logits: torch.Tensor, options: Options) -> dict[str, Any]:
    """Return the compile-time constants of a launch: those of a training run, and its tile."""
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    vocab, has_softcap = logits.shape[1], options.softcap is not None
    tile = config(tuple(logits.shape), logits.dtype, launch_gpu(logits.device), has_softcap)
    coldness = 1.0 / options.temperature
    return {
        "ACC": triton_accumulator(logits.dtype),
        # As arguments they would be rounded to fp32.
        "SCALE": options.logit_scale * (1.0 if has_softcap else coldness),
        "SOFTCAP": None if options.softcap is None else float(options.softcap),
        "COLDNESS": coldness if has_softcap else 1.0,
        "HAS_PADDING": vocab % 16 != 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": vocab > FEW_COLUMNS,
    }


def log_prob_of(
    logits: torch.Tensor, labels: torch.Tensor, statistics: Statistics, options: Options
) -> None:
    """Write the log-probability of each row's label, its entropy, and what the backward needs.

    Reads the logits once.

    Args:
        logits: (M, N), unit column stride, any row stride; every row, the last one too, is
            followed by memory of no meaning up to the next multiple of 16 columns.
        labels: (M,) int64, contiguous, in [0, N) or `options.ignore_index`.
        statistics: (M,) each, in accumulator dtype, contiguous: receive the maximum z*, log Σ
            exp(z − z*), log p and, where there is a fourth, the entropy; the last two are 0 for
            ignored rows.
        options: how logits become final.
    """
    rows, vocab = logits.shape
    constants = _constants(logits, options)
    maximum, log_total, log_prob, entropy = (*statistics, None)[:4]
    _log_prob_fwd_kernel[(triton.cdiv(rows, constants["BLOCK_M"]),)](
        logits,
        labels,
        maximum,
        log_total,
        log_prob,
        entropy,
        rows,
        vocab,
        logits.stride(0),
        options.ignore_index,
        **constants,
    )


def logits_gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    statistics: Statistics,
    grad_log_prob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    options: Options,
) -> None:
    """Turn logits into their gradient, in place; reads and writes them once.

    Args:
        logits: as `log_prob_of` took them.
        labels: as there.
        statistics: as it left them.
        grad_log_prob: (M,) in accumulator dtype, contiguous, or None for zeros.
        grad_entropy: likewise; needs the fourth of the statistics.
        options: as there.
    """
    rows, vocab = logits.shape
    constants = _constants(logits, options)
    maximum, log_total, log_prob, entropy = (*statistics, None)[:4]
    _log_prob_bwd_kernel[(triton.cdiv(rows, constants["BLOCK_M"]),)](
        logits,
        labels,
        maximum,
        log_total,
        log_prob,
        entropy,
        grad_log_prob,
        grad_entropy,
        rows,
        vocab,
        logits.stride(0),
        options.ignore_index,
        **constants,
    )

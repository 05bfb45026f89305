"""How the kernels of cross entropy are launched: tiles, and tensors in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import triton

from nearlight.core.hardware import Gpu
from nearlight.core.launch import launch_gpu
from nearlight.core.rows import FEW_COLUMNS, accumulator, as_rows, triton_accumulator
from nearlight.core.tuned import tunable
from nearlight.ops._linear_logits import check_labels
from nearlight.ops.cross_entropy import kernels
from nearlight.ops.cross_entropy.tiles import ALIGNMENT

# Wider rows that are read twice are walked by one program per SM: few rows are in flight then, and
# what was read for the first time is still in L2 when it is read again.
WIDE_BYTES = 2**17
# Labels of a program that sums the divisor, and of one step of it.
DIVISOR_ROWS, DIVISOR_BLOCK = 65_536, 8192
SCALE_BLOCK, SCALE_PROGRAMS_PER_SM = 8192, 8


@dataclass(frozen=True)
class Config:
    """How the rows are walked.

    Attributes:
        block_m: rows of a program; 1 on a GPU.
        block_r: vectors of a row that a thread holds at once.
        block_c: columns from one of these to the next, a vector for each thread.
        num_warps: warps of a program.
        num_stages: depth of the loads' pipeline; 1 for none.
        keeps_row: whether L2 is told to keep a row until it is read again, and nothing beside it.
    """

    block_m: int
    block_r: int
    block_c: int
    num_warps: int
    num_stages: int = 1
    keeps_row: bool = True


def _tile(vocab: int, dtype: torch.dtype, num_warps: int, vectors: int) -> Config:
    """Return a tile of 16-byte vectors per thread, no wider than the row."""
    widest = triton.next_power_of_2(vocab)
    lanes = 32 * 16 // dtype.itemsize
    num_warps = max(1, min(num_warps, widest // lanes))
    block_c = min(widest, num_warps * lanes)
    return Config(1, min(vectors, widest // block_c), block_c, num_warps)


def candidates(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, is_heavy: bool, reads_twice: bool
) -> dict[Config, str]:
    """Return the launches worth a try, each with "" or why it cannot run; see `config`."""
    if gpu is None:
        return {}
    return dict.fromkeys(
        (
            replace(_tile(shape[1], dtype, num_warps, vectors), num_stages=stages, keeps_row=keeps)
            for num_warps, vectors, stages, keeps in product(
                (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 3), (True, False)
            )
            # Triton holds fp32: 64 elements of a thread leave no room for the lanes' sums.
            if vectors * 16 // dtype.itemsize < 64 or num_warps <= 16
        ),
        "",
    )


@tunable("cross_entropy", candidates)
def config(
    shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu | None, is_heavy: bool, reads_twice: bool
) -> Config:
    """Choose the tile for (rows, vocabulary) on a GPU, or for the interpreter where it is None.

    With what takes registers beside a tile (`is_heavy`) a thread holds less of it. A row that is
    read twice is read by few programs with much in flight each, so that L2 holds it until the
    second time; one that is read once by as many programs as possible.
    """
    rows, vocab = shape
    if gpu is None:  # a program costs the same whatever its tile
        block = min(triton.next_power_of_2(vocab), 16384)
        block_r = min(2, block)
        return Config(
            min(triton.next_power_of_2(rows), 2**17 // block), block_r, block // block_r, 4
        )
    if is_heavy or not reads_twice:
        return _tile(vocab, dtype, 8, 2 if is_heavy else 4)
    num_warps = 16 if vocab * dtype.itemsize > WIDE_BYTES else 8
    # In fp32, as sums run, half precision takes twice the registers; elsewhere ptxas spills soon.
    is_hopper = gpu.compute_capability[0] == 9
    vectors = (8 if dtype.itemsize == 2 else 4) if is_hopper else 2
    return _tile(vocab, dtype, num_warps, vectors)


class Arguments(NamedTuple):
    """What the ops take, all by position.

    Attributes:
        logits: (..., V), any strides.
        labels: (...) int64, any strides.
        class_weight: (V,) or None.
        token_weight: (...) or None.
        num_items: () or None.
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, stats: as in the
            public function.
        has_gradient: whether the forward computes the gradient.
        has_later_gradient: whether a backward will, from the statistics.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    class_weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    num_items: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    reduction: str
    stats: list[str]
    has_gradient: bool
    has_later_gradient: bool


class Results(NamedTuple):
    """What the forward gives; of what is not asked for a tensor without elements.

    Attributes:
        loss: () or (...).
        gradient: (..., V), contiguous, of the scalar loss.
        statistics: (2, rows): z* and Σ exp(z_v − z*) over v ≠ label.
        divisor: () of the reduction.
        logsumexp, argmax, entropy: (...).
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    statistics: torch.Tensor
    divisor: torch.Tensor
    logsumexp: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor


def has_divisor(arguments: Arguments) -> bool:
    """Return whether the sum of the losses is divided."""
    return arguments.reduction == "mean" or arguments.num_items is not None


def empty_results(arguments: Arguments) -> Results:
    """Return the results, not yet written; the loss has a value per row."""
    logits, labels = arguments[:2]
    dtype, stats = accumulator(logits.dtype), arguments.stats

    def new(is_needed: bool, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape if is_needed else (0,), dtype=dtype, device=logits.device)

    return Results(
        new(True, *labels.shape),
        new(arguments.has_gradient, *logits.shape, dtype=logits.dtype),
        new(arguments.has_later_gradient, 2, labels.numel()),
        new(has_divisor(arguments)),
        new("logsumexp" in stats, *labels.shape),
        new("argmax" in stats, *labels.shape, dtype=torch.int64),
        new("entropy" in stats, *labels.shape),
    )


def _vectors(arguments: Arguments, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return flat labels, token and class weights, and the sum of these where it is needed."""
    labels = arguments.labels.reshape(-1).contiguous()
    token_weight, class_weight = arguments.token_weight, arguments.class_weight
    if token_weight is not None:
        token_weight = token_weight.reshape(-1)
    class_weight_sum = None
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
        class_weight_sum = class_weight.sum() if arguments.label_smoothing > 0 else None
    return labels, token_weight, class_weight, class_weight_sum


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def divide(
    arguments: Arguments,
    labels: torch.Tensor,
    token_weight: torch.Tensor | None,
    class_weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return what the sum of the losses is divided by, or None; labels outside are an error."""
    vocab, dtype = arguments.logits.shape[-1], accumulator(arguments.logits.dtype)
    if labels.is_cpu:
        check_labels("cross_entropy", labels, vocab, arguments.ignore_index)
    num_programs = triton.cdiv(labels.numel(), DIVISOR_ROWS)
    shape = (num_programs,) if num_programs > 1 else ()
    is_mean = arguments.reduction == "mean"
    divisor = torch.empty(shape, dtype=dtype, device=labels.device) if is_mean else None
    is_allowed = torch.empty(shape, dtype=torch.bool, device=labels.device)
    kernels._divisor_kernel[(num_programs,)](
        labels, token_weight, class_weight, divisor, is_allowed,
        labels.numel(), vocab, _stride(token_weight), arguments.ignore_index,
        ACC=triton_accumulator(arguments.logits.dtype), ROWS=DIVISOR_ROWS, BLOCK=DIVISOR_BLOCK,
        num_warps=16,
    )  # fmt: skip
    if num_programs > 1:
        divisor, is_allowed = None if divisor is None else divisor.sum(), is_allowed.all()
    if labels.is_cuda:  # no wait for the device
        message = f"a label is neither in [0, {vocab}) nor ignore_index={arguments.ignore_index}"
        torch._assert_async(is_allowed, f"cross_entropy: {message}")
    if arguments.num_items is not None:
        divisor = arguments.num_items.to(labels.device, dtype)
    return divisor


def _aligns(tile: Config, vocab: int, stride: int, gradient_stride: int) -> bool:
    """Return whether tiles are moved to where accesses are wide: rows of 50,257 start anywhere.

    Those of the gradient have to start where those of the logits do, and a tile must reach from
    there into its row.
    """
    is_close = stride == gradient_stride == vocab and vocab % ALIGNMENT.value != 0
    return is_close and tile.block_m == 1 and tile.block_c >= ALIGNMENT.value


def _is_heavy(arguments: Arguments) -> bool:
    """Return whether a thread needs registers for more than a tile, maxima and sums."""
    weighs_all = arguments.class_weight is not None and arguments.label_smoothing > 0
    has_heavy_stats = bool({"argmax", "entropy"} & {*arguments.stats})
    return weighs_all or has_heavy_stats or arguments.softcap is not None


def _constants(
    arguments: Arguments, logits: torch.Tensor, stride: int, reads_twice: bool
) -> dict[str, Any]:
    """Return the compile-time constants of a launch over rows of logits, and its grid."""
    rows, vocab = logits.shape
    gpu, is_heavy = launch_gpu(logits.device), _is_heavy(arguments)
    tile = config((rows, vocab), logits.dtype, gpu, is_heavy, reads_twice)
    return {
        "grid": (triton.cdiv(rows, tile.block_m),),
        "ACC": triton_accumulator(logits.dtype),
        # Constants of a training run; as arguments they would be rounded to fp32.
        "SCALE": float(arguments.logit_scale),
        "SOFTCAP": None if arguments.softcap is None else float(arguments.softcap),
        # A single class leaves nothing to smooth, but two terms that must cancel.
        "SMOOTHING": float(arguments.label_smoothing) if vocab > 1 else 0.0,
        "Z_LOSS": float(arguments.z_loss),
        "ALIGNS": _aligns(tile, vocab, logits.stride(0), stride),
        "KEEPS": tile.keeps_row,
        "NUM_STAGES": tile.num_stages,
        "BLOCK_M": tile.block_m,
        "BLOCK_R": tile.block_r,
        "BLOCK_C": tile.block_c,
        "num_warps": tile.num_warps,
        # The gradient of a single class is exactly zero, without the noise of one rounding less.
        "enable_fp_fusion": vocab > FEW_COLUMNS,
    }


def forward(arguments: Arguments, is_in_place: bool = False) -> Results:
    """Compute the losses and what else is asked for.

    Args:
        arguments: what to compute.
        is_in_place: the gradient takes the place of the logits, whose rows must be a view;
            `gradient` is empty then.
    """
    results = empty_results(arguments)
    rows, num_rows = as_rows(arguments.logits), arguments.labels.numel()
    scalar = arguments.reduction != "none"
    if num_rows == 0:
        loss = results.loss.sum() if scalar else results.loss
        return results._replace(loss=loss, divisor=results.divisor.zero_())
    labels, token_weight, class_weight, class_sum = _vectors(arguments, results.loss.dtype)
    divisor = divide(arguments, labels, token_weight, class_weight)
    gradient = None
    if is_in_place or arguments.has_gradient:
        gradient = rows if is_in_place else results.gradient.view(rows.shape)
    pitch = _stride(gradient) if gradient is not None else rows.stride(0)
    constants = _constants(arguments, rows, pitch, gradient is not None)
    optional = (results.statistics, results.logsumexp, results.argmax, results.entropy)
    kernels._cross_entropy_fwd_kernel[constants.pop("grid")](
        rows, gradient, labels, divisor, token_weight, class_weight, class_sum, results.loss,
        *(tensor if tensor.numel() else None for tensor in optional),
        *rows.shape, rows.stride(0), pitch, _stride(token_weight), arguments.ignore_index,
        **constants,
    )  # fmt: skip
    return results._replace(
        loss=results.loss.sum() if scalar else results.loss,
        divisor=results.divisor if divisor is None else divisor,
    )


def backward(
    grad_loss: torch.Tensor, statistics: torch.Tensor, divisor: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Compute the gradient of the logits for an upstream gradient () or per row."""
    arguments = Arguments(*args)
    logits = arguments.logits
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel() == 0:
        return gradient
    rows = as_rows(logits)
    labels, token_weight, class_weight, class_sum = _vectors(arguments, statistics.dtype)
    upstream = grad_loss.reshape(-1)
    constants = _constants(arguments, rows, rows.shape[1], False)
    kernels._cross_entropy_bwd_kernel[constants.pop("grid")](
        upstream, rows, gradient, labels, divisor if has_divisor(arguments) else None,
        token_weight, class_weight, class_sum, statistics,
        *rows.shape, rows.stride(0), rows.shape[1], _stride(token_weight),
        upstream.stride(0) if grad_loss.ndim else 0, arguments.ignore_index,
        **constants,
    )  # fmt: skip
    return gradient


def scale(source: torch.Tensor, target: torch.Tensor, factor: torch.Tensor) -> None:
    """Write a tensor times a 0-d factor, which the host does not read.

    Args:
        source: rows of unit column stride.
        target: in the same layout; `source` itself where 1 as a factor leaves all as it is.
        factor: ().
    """
    gpu, num_elements = launch_gpu(source.device), source.numel()
    if num_elements == 0:
        return
    block = SCALE_BLOCK if gpu else min(triton.next_power_of_2(num_elements), 2**17)
    programs = triton.cdiv(num_elements, block)
    kernels._scale_kernel[(min(programs, gpu.num_sms * SCALE_PROGRAMS_PER_SM if gpu else 64),)](
        source, target, factor, num_elements,
        ACC=triton_accumulator(source.dtype), IN_PLACE=source is target, BLOCK=block, num_warps=8,
    )  # fmt: skip

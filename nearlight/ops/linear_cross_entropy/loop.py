"""The loop over the chunks: logits, their loss and gradient in place, products of the gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nearlight.core.rows import accumulator
from nearlight.ops.linear_cross_entropy.chunks import Plan, plan, row_pitch
from nearlight.ops.linear_cross_entropy.kernels import LossOptions, cross_entropy_, split_add_

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

Needs = tuple[bool, bool, bool]


class Arguments(NamedTuple):
    """What the forward op takes, all by position; the backward op takes the same after grad_loss.

    Attributes:
        x: (..., H), any strides.
        weight: (V, H), any strides.
        labels: (...) int64, any strides.
        bias: (V,) or None.
        class_weight: (V,) or None.
        token_weight: (...) or None.
        num_items: () or None.
        ignore_index: label of the rows that do not count.
        label_smoothing, z_loss, softcap, logit_scale, reduction, memory_budget_bytes: as in
            the public function.
        needs_x: whether to compute the gradient of x.
        needs_weight: of the weight.
        needs_bias: of the bias.
    """

    x: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    num_items: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    reduction: str
    memory_budget_bytes: int | None
    needs_x: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def needs(self) -> Needs:
        """Which gradients are asked for: x, weight, bias."""
        return self.needs_x, self.needs_weight, self.needs_bias

    @property
    def forward_needs(self) -> Needs:
        """Which of them the forward computes: all or none."""
        is_later = self.reduction == "none" or self.x.dtype == torch.float16
        return (False, False, False) if is_later else self.needs

    @property
    def options(self) -> LossOptions:
        """What the loss of a row is made of."""
        return LossOptions(
            self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.logit_scale
        )


def check_labels(labels: torch.Tensor, vocab: int, ignore_index: int) -> None:
    """Raise for a label outside [0, vocab) that is not ignored; on CUDA when the device gets there.

    Raises:
        ValueError: on a CPU.
        RuntimeError: on CUDA, from the next call that waits for the device.
    """
    is_allowed = ((labels >= 0) & (labels < vocab)) | (labels == ignore_index)
    message = f"a label is neither in [0, {vocab}) nor ignore_index={ignore_index}"
    if labels.is_cpu:
        if not bool(is_allowed.all()):
            raise ValueError(f"{message}: {int(labels[~is_allowed][0])}")
    else:  # no wait for the device
        torch._assert_async(is_allowed.all(), f"linear_cross_entropy: {message}")


def row_weights(
    labels: torch.Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    class_weight: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    reduction: str,
) -> torch.Tensor:
    """Return what multiplies the loss of each row (M,): its weight over the reduction's divisor.

    A divisor of 0 (all rows ignored, or no rows) makes the loss 0 instead of NaN.
    """
    is_counted = labels != ignore_index
    divisor = torch.ones((), dtype=dtype, device=labels.device)
    if reduction == "mean":
        weights = is_counted.to(dtype)
        if class_weight is not None:
            weights = weights * class_weight[labels.masked_fill(~is_counted, 0)]
        if token_weight is not None:
            weights = weights * token_weight
        divisor = torch.where(is_counted, weights, 0.0).sum()
    elif num_items is not None:
        divisor = num_items.to(labels.device, dtype)
    factor = torch.where(divisor != 0, 1.0 / divisor, 0.0)
    return factor.expand(labels.shape) if token_weight is None else token_weight * factor


def run(
    arguments: Arguments, needs: Needs, grad_loss: torch.Tensor | None = None
) -> tuple[torch.Tensor, *Gradients]:
    """Compute the losses of the rows and the gradients, in the shapes of labels and inputs."""
    x, weight, labels = arguments[:3]
    dtype = accumulator(x.dtype)
    flat = labels.reshape(-1).contiguous()
    check_labels(flat, weight.shape[0], arguments.ignore_index)
    class_weight, token_weight = arguments.class_weight, arguments.token_weight
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(dtype)
    row_weight = row_weights(
        flat,
        dtype,
        arguments.ignore_index,
        class_weight,
        token_weight,
        arguments.num_items,
        arguments.reduction,
    )
    if grad_loss is not None:
        row_weight = row_weight * grad_loss.reshape(-1)
    matrices = arguments._replace(
        x=_as_matrix(x.reshape(-1, x.shape[-1])), weight=_as_matrix(weight), labels=flat
    )
    loss, grad_x, grad_weight, grad_bias = _chunks(matrices, row_weight, class_weight, needs)
    grad_x = grad_x.view(x.shape) if needs[0] else grad_x
    return loss.view(labels.shape), grad_x, grad_weight, grad_bias


def _chunks(
    arguments: Arguments,
    row_weight: torch.Tensor,
    class_weight: torch.Tensor | None,
    needs: Needs,
) -> tuple[torch.Tensor, *Gradients]:
    """Return the losses of the rows (M,) and the gradients; an empty tensor for one not needed."""
    x, weight, labels, bias = arguments[:4]
    (rows, hidden), vocab = x.shape, weight.shape[0]
    needs_x, needs_weight, needs_bias = needs
    loss = row_weight.new_zeros(rows)
    grad_x = x.new_empty(x.shape if needs_x else 0)
    grad_weight = x.new_empty(weight.shape if needs_weight else 0)
    bias_sum = row_weight.new_zeros(vocab if needs_bias else 0)
    if rows == 0:
        return loss, grad_x, grad_weight.zero_(), bias_sum.to(x.dtype)
    steps = plan(rows, vocab, hidden, x.dtype, needs_weight, arguments.memory_budget_bytes)
    weight_sum = WeightSum(grad_weight, steps) if needs_weight else None
    class_weight_sum = None if class_weight is None else class_weight.sum()
    buffer = x.new_empty(steps.rows, row_pitch(vocab))
    if vocab % 16:  # the kernel reads whole vectors, and uses nothing beyond the vocabulary
        buffer[:, vocab : -(-vocab // 16) * 16] = 0
    for start in range(0, rows, steps.rows):
        chunk = slice(start, min(start + steps.rows, rows))
        logits = buffer[: chunk.stop - start, :vocab]
        if bias is None:
            torch.mm(x[chunk], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[chunk], weight.t(), out=logits)
        loss[chunk] = cross_entropy_(
            logits,
            labels[chunk],
            row_weight[chunk],
            arguments.options,
            class_weight,
            class_weight_sum,
            write_gradient=any(needs),
            has_padding=True,
        )
        # From here on the buffer holds the gradient of the logits.
        if needs_x:
            torch.mm(logits, weight, out=grad_x[chunk])
        if weight_sum is not None:
            weight_sum.add(logits, x[chunk])
        if needs_bias:
            bias_sum += logits.sum(0, dtype=bias_sum.dtype)
    return loss, grad_x, grad_weight, bias_sum.to(x.dtype)


class WeightSum:
    """The weight gradient as it is summed over the chunks, the way the plan says."""

    def __init__(self, total: torch.Tensor, steps: Plan) -> None:
        self.total = total
        self.num_chunks = steps.num_chunks
        self.columns = steps.product_columns
        self.added = 0
        if self.columns:
            self.lower = torch.empty_like(total, dtype=torch.uint8)
            self.product = total.new_empty(self.columns, total.shape[1], dtype=torch.float32)

    def add(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add gradientᵀ @ x of one chunk."""
        self.added += 1
        if not self.columns:
            if self.added == 1:
                torch.mm(gradient.t(), x, out=self.total)
            else:
                self.total.addmm_(gradient.t(), x)
            return
        for start in range(0, self.total.shape[0], self.columns):
            part = slice(start, start + self.columns)
            columns = gradient[:, part].t()
            product = self.product[: columns.shape[0]]
            if x.is_cpu:  # has no product of bf16 that stays in fp32
                torch.mm(columns.float(), x.float(), out=product)
            else:
                torch.mm(columns, x, out_dtype=torch.float32, out=product)
            split_add_(
                self.total[part],
                self.lower[part],
                product,
                is_first=self.added == 1,
                is_last=self.added == self.num_chunks,
            )


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 2-D tensor that cuBLAS takes as it lies: one copy here, not one per chunk."""
    return tensor if 1 in tensor.stride() and 0 not in tensor.stride() else tensor.contiguous()

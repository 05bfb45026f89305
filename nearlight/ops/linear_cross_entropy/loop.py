"""What a call is made of: its arguments, the weights of its rows, its turn with each chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nearlight.core.rows import accumulator
from nearlight.ops._chunks import Plan, plan
from nearlight.ops._linear_logits import Gradients, Needs, as_matrix, check_labels, over_chunks
from nearlight.ops.linear_cross_entropy.kernels import LossOptions, cross_entropy_


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

    def plan(self, needs: Needs) -> Plan:
        """Return how the call goes through its rows where these gradients are computed."""
        (vocab, hidden), rows = self.weight.shape, self.labels.numel()
        return plan(rows, vocab, hidden, self.x.dtype, needs[1], self.memory_budget_bytes)


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
    x, weight, labels, bias = arguments[:4]
    dtype = accumulator(x.dtype)
    flat = labels.reshape(-1).contiguous()
    check_labels("linear_cross_entropy", flat, weight.shape[0], arguments.ignore_index)
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
    loss = row_weight.new_zeros(flat.shape)
    class_weight_sum = None if class_weight is None else class_weight.sum()

    def turn(logits: torch.Tensor, rows: slice) -> None:
        loss[rows] = cross_entropy_(
            logits,
            flat[rows],
            row_weight[rows],
            arguments.options,
            class_weight,
            class_weight_sum,
            write_gradient=any(needs),
            has_padding=True,
        )

    steps = arguments.plan(needs)
    gradients = over_chunks(as_matrix(x), as_matrix(weight), bias, needs, steps, turn)
    grad_x, grad_weight, grad_bias = gradients
    grad_x = grad_x.view(x.shape) if needs[0] else grad_x
    return loss.view(labels.shape), grad_x, grad_weight, grad_bias

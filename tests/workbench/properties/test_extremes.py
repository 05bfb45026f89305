"""Property 6: zeros in inputs whose gradient nobody asks for."""

from __future__ import annotations

import pytest
import torch


def test_zeros_are_tried_in_inputs_without_a_gradient_and_in_vectors(plain_op, failures):
    def make_inputs(case, device, generator):
        rows, columns = case.shape.values()
        x, table = torch.randn(2, rows, columns, generator=generator)
        weight = torch.rand(columns, generator=generator)
        return {"x": x.requires_grad_(), "table": table, "weight": weight}

    def scaled(x, table, weight):
        return x * table / table.norm(dim=-1, keepdim=True).clamp_min(1e-6) * weight

    def wrong_table(x, table, weight):
        return scaled(x, table, weight) + (table == 0).all(-1, keepdim=True)

    def wrong_weight(x, table, weight):
        return scaled(x, table, weight) + (weight == 0)

    sound = plain_op(scaled, make_inputs=make_inputs)
    assert failures(sound, "extremes") == {}
    for wrong, words in ((wrong_table, "a row of zeros in table: "), (wrong_weight, "a zero in")):
        op = plain_op(wrong, scaled, make_inputs=make_inputs)
        assert failures(op, "extremes")["extremes"].startswith(words)


def _where(x):
    return torch.where(x > 0, x, 0.0)


def _clamped(x):
    return torch.where(x == torch.inf, 3e38, x)


def _spread_in_rows(x):
    return x + 0.0 * x.sum(-1, keepdim=True)


def _spread_everywhere(x):
    return x + 0.0 * x.sum()


class _Scaled(torch.autograd.Function):
    """relu(x) · weight; its backward multiplies by 0 what torch's leaves out."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.relu(x) * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return (x > 0) * weight * gradient, torch.relu(x) * gradient


def test_a_gradient_may_be_lost_beside_a_lost_output(plain_op, failures):
    def make_inputs(case, device, generator):
        x, weight = torch.randn(2, *case.shape.values(), generator=generator)
        return {"x": x.requires_grad_(), "weight": weight.requires_grad_()}

    def reference(x, weight):
        return torch.relu(x) * weight

    op = plain_op(_Scaled.apply, reference, make_inputs=make_inputs)
    assert failures(op, "extremes") == {}


class _KeepsNoNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).nan_to_num(0.0)


class _NanLosesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x <= 0, 0.0, x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, gradient, 0.0)


@pytest.mark.parametrize(
    ("function", "reference", "words"),
    [
        (_where, torch.relu, "a NaN in x: output: 1 of"),
        (_clamped, lambda x: x * 1.0, "an inf in x: output: "),
        (_KeepsNoNan.apply, torch.square, "a NaN in x: gradient of x: 1 of"),
        (_NanLosesItsGradient.apply, torch.relu, None),  # no step is taken from a NaN
        (lambda x: x * torch.sigmoid(x), lambda x: torch.nn.functional.silu(x), None),
        (lambda x: x - x.detach(), lambda x: x - x.detach(), None),
        (_spread_in_rows, lambda x: x * 1.0, None),  # the row is lost in either
        (_spread_everywhere, lambda x: x * 1.0, "a NaN in x: output: "),
    ],
)
def test_a_nan_or_infinity_is_not_swallowed(plain_op, failures, function, reference, words):
    found = failures(plain_op(function, reference), "extremes").get("extremes")
    assert found is None if words is None else found.startswith(words)


def test_a_function_or_reference_may_refuse_a_nan(plain_op, failures):
    def reference(x):
        if x.isnan().any():
            raise ValueError("x has a NaN")
        return 2 * x

    assert failures(plain_op(reference), "extremes") == {}
    assert failures(plain_op(lambda x: 2 * x, reference), "extremes") == {}

"""Property 6: zeros in inputs whose gradient nobody asks for."""

from __future__ import annotations

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

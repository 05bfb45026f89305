from __future__ import annotations

import torch

from nearlight.core.numerics import judge
from nearlight.ops._chunks import Plan
from nearlight.ops._linear_logits import WeightSum


def test_weight_sum_matches_one_product_whatever_the_chunks():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(768, 40, generator=generator).bfloat16()
    # A first chunk that dominates: later ones would vanish in a bf16 sum.
    gradient[128:] *= 2.0**-8
    x = torch.ones(768, 8, dtype=torch.bfloat16)
    truth = gradient.double().t() @ x.double()
    for plan in (
        Plan(256, 3, 0, 0),
        Plan(128, 6, 40, 0),
        Plan(64, 12, 16, 0),
    ):
        total = torch.full((40, 8), torch.nan, dtype=torch.bfloat16)
        weight_sum = WeightSum(total, plan)
        for start in range(0, 768, plan.rows):
            weight_sum.add(gradient[start : start + plan.rows], x[start : start + plan.rows])
        judgement = judge(total, gradient.t() @ x, truth)
        assert judgement.passed, judgement.reason

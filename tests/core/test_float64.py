import copy

import torch
from torch import nn

from nearlight.core.float64 import KeepFloat64, float64_copy


class Norm(nn.Module):
    """Casts to fp32 as transformers' norms do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


def test_double_alone_is_no_truth_and_this_one_is():
    norm = Norm()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double()
    weight = norm.weight.double()
    expected = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    alone = (copy.deepcopy(norm).double()(x) - expected).abs().max()
    with KeepFloat64():
        kept = (float64_copy(norm)(x) - expected).abs().max()
    assert kept < 1e-14 < 1e-9 < alone


def test_gradients_stay_in_fp64_too():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    with KeepFloat64():
        torch.autograd.gradcheck(float64_copy(Norm()), (x,))


def test_integers_cast_to_float_meet_fp64():
    with KeepFloat64():
        assert torch.arange(3).float().dtype == torch.float64
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
    assert torch.arange(3).float().dtype == torch.float32


def test_the_module_itself_is_left_alone():
    norm = Norm()
    copied = float64_copy(norm)
    assert norm.weight.dtype == torch.float32 and copied.weight.dtype == torch.float64
    assert torch.equal(copied.weight, norm.weight.double())


def test_experts_leave_the_product_that_torch_lacks_in_fp64():
    class Config:
        _experts_implementation = "grouped_mm"

    norm = Norm()
    norm.config = Config()
    assert float64_copy(norm).config._experts_implementation == "eager"
    assert norm.config._experts_implementation == "grouped_mm"

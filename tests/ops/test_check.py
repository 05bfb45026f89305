"""Every op has the properties of the quick check; the full one is run by `prove`."""

from __future__ import annotations

import pytest
import torch

from nearlight.core.op import Case
from nearlight.ops import OPS, softmax
from nearlight.workbench.check import check
from nearlight.workbench.trial import Trial, make_inputs, tensors


@pytest.mark.parametrize("name", sorted(OPS))
def test_quick_check(name: str):
    report = check(OPS[name], quick=True)
    assert report.proof is not None
    failed = [(row["reason"], row["reproduce"]) for row in report.rows if row["status"] == "failed"]
    assert report.proof.passed, failed
    assert "no nearlight kernel" not in report.setup


@pytest.mark.parametrize(
    "name, case",
    [(n, case) for n, op in OPS.items() for case in op.check_cases if case.dtype == torch.float64],
)
def test_inputs_in_fp64_are_no_numbers_of_fp32(name: str, case: Case):
    """Else a value that a kernel rounds to fp32 would not show."""
    wide = {
        name: tensor
        for name, tensor in tensors(make_inputs(OPS[name], Trial(case), "cpu")).items()
        if tensor.dtype == torch.float64
    }
    assert wide
    for each, tensor in wide.items():
        assert not torch.equal(tensor, tensor.float().double()), each


def test_forward_mode_is_right_by_the_reference_and_refused_by_a_kernel():
    x, direction = torch.randn(2, 3, 8, dtype=torch.float64).unbind()

    def through(backend: str):
        return torch.func.jvp(lambda x: softmax(x, backend=backend), (x,), (direction,))[1]

    found = through("auto")
    y = x.softmax(-1)
    torch.testing.assert_close(found, y * (direction - (y * direction).sum(-1, keepdim=True)))
    with pytest.raises(NotImplementedError, match="kernels have no forward-mode derivative"):
        through("triton")

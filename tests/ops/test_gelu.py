"""What holds of GELU alone; what holds of every activation is in test_unary.py."""

import pytest
import torch

from nearlight.core.triton import compile_for
from nearlight.ops.gelu import OP, gelu


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="approximate='sigmoid'; allowed are 'none'"):
        gelu(torch.ones(2), "sigmoid")


def test_few_instructions_leave_it_to_the_memory():
    # An H200 issues 31 instructions in the time it moves the 4 bytes of a bf16 element there and
    # back; by erf it takes 42.
    build = next(build for build in OP.builds("sm_90a") if "fwd" in build.kernel.fn.__name__)
    code = compile_for(build, "sm_90a")
    per_thread = build.constants["BLOCK_M"] * build.constants["BLOCK_N"] / (32 * build.num_warps)
    assert sum(code.instructions.values()) / per_thread < 24

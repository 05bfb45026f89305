import dataclasses

import pytest
import torch

from nearlight.core.cost import Cost
from nearlight.core.op import Case, Extreme, KernelBuild, Op


def record(**fields):
    return Op(
        name="double",
        function=lambda x: 2 * x,
        reference=lambda x: 2 * x,
        make_inputs=lambda case, device, generator: {"x": torch.ones(case.shape["rows"])},
        cases=[],
        check_cases=[],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
        **fields,
    )


def test_what_a_record_may_leave_out_is_empty():
    op = record()
    assert (op.peers, op.large_cases, op.extremes, op.refused_layouts) == ({}, (), (), {})
    assert op.builds("sm_90") == ()


def test_records_do_not_change():
    case = Case("4", {"rows": 4})
    build = KernelBuild(None, {}, {})
    extreme = Extreme("zeros", case, lambda inputs: inputs)
    for one in (record(), case, build, extreme):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.name = "other"


def test_a_build_allows_no_spill_unless_it_says_so():
    build = KernelBuild(None, {"x_ptr": "*bf16"}, {"BLOCK": 128})
    assert (build.max_spill_bytes, build.max_registers) == (0, 255)
    assert case_dtype() == torch.bfloat16


def case_dtype():
    return Case("4", {"rows": 4}).dtype

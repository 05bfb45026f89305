import dataclasses

import pytest
import torch

from nearlight.core.cost import Cost
from nearlight.core.errors import BadInput
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


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        *(({"num_warps": n}, "1, 2, 4, 8, 16, 32") for n in (3, 0, -4, 4.5, 64, True, "4", None)),
        *(({"num_stages": n}, "whole numbers from 0") for n in (-1, 2.0, True, None)),
        *(({"enable_fp_fusion": n}, "True and False") for n in (3, 1, None)),
    ],
    ids=str,
)
def test_a_launch_option_that_triton_lacks_is_refused_with_what_is_allowed(option, allowed):
    ((name, value),) = option.items()
    with pytest.raises(BadInput) as error:
        KernelBuild(None, {}, {}, **option)
    assert str(error.value).startswith(f"{name}={value!r}: allowed are ")
    assert str(error.value).endswith(allowed)


@pytest.mark.parametrize(
    "options", [{"num_warps": 32}, {"num_stages": 0}, {"enable_fp_fusion": False}], ids=str
)
def test_a_launch_option_that_triton_has_is_taken(options):
    build = KernelBuild(None, {}, {}, **options)
    assert options.items() <= vars(build).items()

import pytest
import torch
from torch.autograd import forward_ad

from nearlight.core import backend

CPU = torch.ones(2)


def test_auto_on_cpu_is_the_reference_and_says_why():
    choice = backend.choose("auto", CPU)
    assert choice.backend == "reference"
    assert "cpu" in choice.reason
    assert not backend.use_triton("auto", CPU)


def test_a_forced_backend_is_never_replaced():
    assert backend.use_triton("triton", CPU)
    with backend.force("triton"):
        assert backend.choose("auto", CPU).backend == "triton"
        assert backend.use_triton("auto", CPU)
        # The call's own wish comes first.
        assert not backend.use_triton("reference", CPU)
    assert not backend.use_triton("auto", CPU)


def test_inside_forward_mode_auto_is_the_reference_and_a_kernel_is_refused():
    """Torch would answer 0: it drops the tangents of what needs no gradient in a library's op."""

    class OnGpu:
        is_cuda = True
        device = torch.device("cuda")

    assert backend.use_triton("auto", OnGpu())
    with forward_ad.dual_level():
        assert not backend.use_triton("auto", OnGpu())
        choice = backend.choose("auto", OnGpu())
        assert choice.backend == "reference" and "torch.func.jvp" in choice.reason
        assert not backend.use_triton("reference", CPU)
        for call in (backend.use_triton, lambda b, x: backend.use_cuda("cuda", x)):
            with pytest.raises(NotImplementedError, match="use backend='reference'"):
                call("triton", CPU)
    assert backend.use_triton("triton", CPU)


def test_force_is_undone_after_an_error():
    with pytest.raises(KeyError), backend.force("triton"):
        raise KeyError
    assert not backend.use_triton("auto", CPU)


def test_an_op_in_cuda_cpp_is_asked_for_by_its_own_name_and_forced_like_any_other():
    assert backend.use_cuda("cuda", CPU)
    assert not backend.use_cuda("auto", CPU)
    with backend.force("triton"):
        assert backend.use_cuda("auto", CPU)
        assert not backend.use_cuda("reference", CPU)
    with pytest.raises(ValueError, match="'triton': allowed are auto, cuda, reference"):
        backend.use_cuda("triton", CPU)


def test_an_unknown_backend_names_the_allowed():
    for call in (backend.use_triton, backend.choose):
        with pytest.raises(ValueError, match="auto, triton, reference"):
            call("cutlass", CPU)

import pytest
import torch

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


def test_force_is_undone_after_an_error():
    with pytest.raises(KeyError), backend.force("triton"):
        raise KeyError
    assert not backend.use_triton("auto", CPU)


def test_an_unknown_backend_names_the_allowed():
    for call in (backend.use_triton, backend.choose):
        with pytest.raises(ValueError, match="auto, triton, reference"):
            call("cutlass", CPU)

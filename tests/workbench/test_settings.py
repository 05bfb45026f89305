"""What belongs to the process: told apart from what a call may do, and set back."""

from __future__ import annotations

import pytest
import torch

from nearlight.workbench.settings import SETTINGS, left_changed, restored

OTHERS = {
    "torch.set_default_dtype": torch.float64,
    "torch.set_grad_enabled": False,
    "torch.set_float32_matmul_precision": "medium",
    "torch.use_deterministic_algorithms": True,
    "os.chdir": "/",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_set_is_named_and_set_back_also_after_an_error(name):
    read, write = SETTINGS[name]
    before = read()
    with restored() as changed:
        write(OTHERS[name])
        assert read() == OTHERS[name] != before
    assert changed == [name] and read() == before
    with pytest.raises(ZeroDivisionError), restored():
        write(OTHERS[name])
        1 / 0  # noqa: B018  # raises
    assert read() == before
    assert left_changed(lambda: write(OTHERS[name])).startswith(f"a call leaves {name} ")
    assert read() == before


def test_drawing_is_told_from_seeding_and_the_generator_is_as_before():
    state = torch.get_rng_state()
    assert left_changed(lambda: torch.rand(3)) == left_changed(lambda: None) == ""
    assert "torch.manual_seed" in left_changed(lambda: torch.manual_seed(3))
    assert "torch.manual_seed" in left_changed(lambda: (torch.manual_seed(3), torch.rand(1)))

    def own_generator():
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            torch.rand(1)

    assert left_changed(own_generator) == ""
    assert torch.equal(torch.get_rng_state(), state)

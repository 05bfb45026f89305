import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from nearlight.profiler.target.quiet import no_progress_bars


@pytest.fixture
def restored():
    was_on = logging.is_progress_bar_enabled()
    yield
    (logging.enable_progress_bar if was_on else logging.disable_progress_bar)()


def drawn(capfd):
    list(logging.tqdm(range(3), desc="Loading weights"))
    return "Loading weights" in capfd.readouterr().err


def test_bars_are_gone_inside_and_back_after_also_past_an_error(restored, capfd):
    logging.enable_progress_bar()
    assert drawn(capfd)
    with pytest.raises(ZeroDivisionError), no_progress_bars():
        assert not drawn(capfd)
        raise ZeroDivisionError
    assert drawn(capfd) and not are_progress_bars_disabled()


def test_bars_that_the_user_turned_off_stay_off(restored, capfd):
    logging.disable_progress_bar()
    with no_progress_bars():
        assert not drawn(capfd)
    assert not drawn(capfd) and not logging.is_progress_bar_enabled()

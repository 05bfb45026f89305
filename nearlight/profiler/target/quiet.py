"""No bars of transformers between our own lines of progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers and huggingface_hub from drawing bars; what the user chose comes back."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    was_hub_quiet = are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if was_hub_quiet:
            disable_progress_bars()

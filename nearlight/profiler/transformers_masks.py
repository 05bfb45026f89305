"""Let transformers choose its attention mask during a trace as it does on a GPU.

transformers looks into its masks (is anything padded? are sequences packed?) and leaves the mask
out if it can, which lets attention take the fast causal kernel. On fake tensors it does not look
and builds the full mask. The real batch is known, so the answers are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from nearlight.profiler.imagined_gpu import replaced


@contextmanager
def masks_as_on_a_gpu(batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Answer transformers' questions about the masks of `batch` while the block lasts.

    Args:
        batch: without `position_ids` no sequences are packed, and an `attention_mask` of ones
            pads nothing; of a fake mask nothing is known, and it is taken to pad.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if masking is not None:
            stack.enter_context(replaced(masking, "is_tracing", lambda tensor=None: False))
            if "position_ids" not in batch:
                name = "find_packed_sequence_indices"
                found = getattr(masking, name)
                stack.enter_context(replaced(masking, name, _nothing_packed(found)))
            if _pads_nothing(batch.get("attention_mask")):
                for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
                    found = getattr(masking, name)
                    stack.enter_context(replaced(masking, name, _without_padding(found)))
        yield


def _pads_nothing(mask: torch.Tensor | None) -> bool:
    if mask is None or mask.ndim != 2 or isinstance(mask, FakeTensor):
        return False
    with unset_fake_temporarily():
        return bool((mask == 1).all())


def _nothing_packed(find: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        find(*args, **kwargs)  # its kernels and its wait for the answer belong to the step

    return call


def _without_padding(ignore: Callable[..., bool]) -> Callable[..., bool]:
    def call(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return ignore(None, *args, **kwargs)

    return call

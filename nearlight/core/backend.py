"""Which backend an op takes: chosen by the device of its tensors, or forced, and always said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.autograd import forward_ad

from nearlight.core import env

Backend = Literal["auto", "triton", "reference"]
BACKENDS = ("auto", "triton", "reference")

_forced: str = env.read("NEARLIGHT_BACKEND")


@dataclass(frozen=True)
class Choice:
    """The backend an op call takes and why."""

    backend: str
    reason: str


@contextmanager
def force(backend: Backend) -> Iterator[None]:
    """Force one backend for every op inside the block, as `NEARLIGHT_BACKEND` does."""
    global _forced
    _check(backend)
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def choose(backend: str, tensor: torch.Tensor) -> Choice:
    """Return the backend for a call on `tensor`; a forced one is never replaced by another."""
    _check(backend)
    if backend != "auto":
        return Choice(backend, "asked for by the call")
    if _forced != "auto":
        return Choice(_forced, "forced by NEARLIGHT_BACKEND or backend.force")
    if tensor.is_cuda and forward_ad._current_level >= 0:
        return Choice("reference", "inside torch.func.jvp or forward_ad, which kernels have not")
    if tensor.is_cuda:
        return Choice("triton", "CUDA tensor")
    return Choice("reference", f"{tensor.device.type} tensor: plain PyTorch is the fast way here")


def use_triton(backend: str, tensor: torch.Tensor) -> bool:
    """Return whether the call runs our kernel; cheap, traceable by torch.compile.

    Raises:
        NotImplementedError: our kernel is asked for inside forward-mode differentiation.
        ValueError: an unknown backend.
    """
    if backend == "auto":
        backend = _forced
    if backend == "auto":
        return tensor.is_cuda and forward_ad._current_level < 0
    _check(backend)
    # Torch drops the tangents of what needs no gradient in an op of a library, and answers 0.
    if backend == "triton" and forward_ad._current_level >= 0:
        raise NotImplementedError(
            "kernels have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
            "forward_ad): use backend='reference' there, or 'auto', which takes it"
        )
    return backend == "triton"


def use_cuda(backend: str, tensor: torch.Tensor) -> bool:
    """The same for an op written in CUDA C++, whose kernel a call asks for as "cuda".

    What is forced for all ops is "triton", which stands for our kernels of either language.
    """
    if backend not in ("auto", "cuda", "reference"):
        raise ValueError(f"backend={backend!r}: allowed are auto, cuda, reference")
    return use_triton("triton" if backend == "cuda" else backend, tensor)


def _check(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")

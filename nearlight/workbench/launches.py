"""What an op launches: every kernel, Triton's and CUDA C++, noted as it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

from nearlight.core import cuda
from nearlight.core.launch import is_describing
from nearlight.core.triton import Kernel


class Launches(list[tuple[str, Mapping[str, Any]]]):
    """Every kernel launched: its name and its sizes known at compile time.

    Attributes:
        not_run: what CUDA C++ on CPU tensors answered where nothing emulates it; else "".
        failed: kernel, arguments, keywords and error of the last launch that raised of a kernel
            that no launch had run through.
        ran: names of the kernels that were.
        started: names of those that a launch set to work, and did not describe alone.
    """

    not_run: str = ""
    failed: tuple[Any, tuple[Any, ...], Mapping[str, Any], Exception] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self.started: set[str] = set()

    def note(self, name: str, sizes: Mapping[str, Any]) -> None:
        """Add a launch."""
        self.append((name, sizes))
        if not is_describing():
            self.started.add(name)

    @contextmanager
    def noted(self, kernel: Any, name: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Note whether the launch inside the block runs through."""
        try:
            yield
        except Exception as error:
            if name not in self.ran:
                self.failed = (kernel, args, kwargs, error)
            raise
        self.ran.add(name)


_noted: ContextVar[Launches | None] = ContextVar("noted", default=None)


def note_elsewhere(kernels: Sequence[str]) -> None:
    """Add kernels that another process launched to those noted here."""
    if (seen := _noted.get()) is not None:
        for name in kernels:
            seen.note(name, {})


@contextmanager
def launches() -> Iterator[Launches]:
    """Note every kernel launched inside the block, Triton's and CUDA C++, also where it fails."""
    seen = Launches()
    start, call = Kernel._start, cuda._Launcher.__call__

    def note(
        self: Kernel, grid: Any, warmup: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        constants = {
            name: value
            for name, value in kwargs.items()
            if name.isupper() and isinstance(value, int) and not isinstance(value, bool)
        }
        seen.note(self.fn.__name__, constants)
        with seen.noted(self, self.fn.__name__, args, kwargs):
            return start(self, grid, warmup, args, kwargs)

    def note_cuda(self: cuda._Launcher, *args: Any) -> None:
        sizes = dict(zip(("BLOCK_X", "BLOCK_Y", "BLOCK_Z"), self.block, strict=True))
        sizes |= {name: int(text) for name, text in self.kernel.defines if text.isdecimal()}
        seen.note(self.kernel.name, sizes)
        try:
            with seen.noted(self.kernel, self.kernel.name, args, {}):
                call(self, *args)
        except cuda.NoEmulator as error:
            seen.not_run = str(error)
            seen.started.discard(self.kernel.name)
            raise

    with (
        mock.patch.object(Kernel, "_start", note),
        mock.patch.object(cuda._Launcher, "__call__", note_cuda),
    ):
        token = _noted.set(seen)
        try:
            yield seen
        finally:
            _noted.reset(token)

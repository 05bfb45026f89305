"""CUDA C++ without a build step: compiled by NVRTC for a named arch, cached, launched by type.

    kernel = Kernel(Path("axpy.cu"), "axpy")
    kernel[(blocks,), (256,)](out, x, n, 2.0)

The same call on CPU tensors goes to the emulator. Compiling needs no GPU and no driver.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nearlight.core import compile_cache, launch
from nearlight.core.cuda_arguments import Parameter, line_of, parameters, typed_arguments
from nearlight.core.cuda_messages import at_source_lines
from nearlight.core.cuda_sources import (
    has_macro_header,
    include_path,
    package_versions,
    source_of,
    sources,
)
from nearlight.core.versions import install_line

# What every kernel is compiled with; part of the cache's key.
_FIXED: dict[str, Any] = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}
# Options that are not the caller's, by what to do instead.
_NOT_OPTIONS = {
    **{name: f"it is always {value!r}" for name, value in _FIXED.items()},
    "name": "it is the file's",
    "arch": "compile takes it",
    "define_macro": "use defines",
    "include_path": "headers lie beside the .cu file, below it or in nearlight/core/include",
    "extra_sources": "include them",
    **dict.fromkeys(
        ("pre_include", "pch", "create_pch", "use_pch", "pch_dir"),
        "an edit of that file would go unnoticed; include the header in the .cu file",
    ),
}

# Devices by index whose context this thread has; afterwards torch's device guard changes it.
_bound = threading.local()


class NoEmulator(RuntimeError):
    """CUDA C++ was launched on CPU tensors, and this version has no emulator."""


class NoKernel(ValueError):
    """A Kernel names a file that is not there, or a function that it does not declare."""


class CompileError(ValueError):
    """The compiler's own lines, with the file and line numbers of the source."""


@dataclass(frozen=True)
class Cubin:
    """Machine code for one arch: the bytes, the kernel's mangled name and the compiler's log.

    `parameters` are those of the source it was compiled from, whatever the file says by now; `ptx`
    is what it was assembled from, with the lines of the source.
    """

    code: bytes
    symbol: str
    arch: str
    log: str
    parameters: tuple[Parameter, ...]
    ptx: str = ""


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function of a .cu file, compiled on the first launch on each arch.

    An edit of the file is seen by the next `compile` and by the first launch of a new Kernel.

    Attributes:
        path: the .cu file.
        name: the function; with template arguments ("copy<float, 4>") where it is a template.
        defines: preprocessor definitions by name.
        options: further NVRTC options by the names of `cuda.core.ProgramOptions`; those that
            nearlight sets itself are refused.
    """

    path: Path
    name: str
    defines: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    _loaded: dict[int, tuple[Any, tuple[Parameter, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameters, read from its source."""
        with _naming(self.path, self.name):
            return parameters(source_of(self.path), self.name)

    @property
    def place(self) -> str:
        """File and line of its declaration; the file alone where a macro or a header has it."""
        line = line_of(source_of(self.path), self.name)
        return f"{self.path}:{line}" if line else str(self.path)

    def compile(self, arch: str) -> Cubin:
        """Compile for an arch ("sm_90a"), or take the result from the cache; needs no GPU."""
        return compile_kernel(self.path, self.name, arch, self.defines, self.options)

    def __getitem__(self, grid_block: tuple[Any, ...]) -> _Launcher:
        grid, block, *shared = grid_block
        return _Launcher(self, _triple(grid), _triple(block), shared[0] if shared else 0)


@dataclass(frozen=True)
class _Launcher:
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int

    def __call__(self, *args: Any) -> None:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        if device is None:
            raise TypeError(f"{self.kernel.name}: a launch needs at least one tensor argument")
        if device.type == "cuda":
            with torch.cuda.device(device):
                return self._launch(device, args)
        self._typed(self.kernel.parameters, args, device)
        if device.type == "meta":
            num_threads = math.prod(self.block)
            launch.describe_cuda(self.kernel, self.grid, num_threads, self.shared_bytes)
        elif 0 not in self.grid:
            _emulator().launch(self.kernel, self.grid, self.block, args, self.shared_bytes)

    def _typed(
        self, declared: Sequence[Parameter], args: tuple[Any, ...], device: torch.device
    ) -> list[Any]:
        try:
            return typed_arguments(self.kernel.name, declared, args, device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.kernel.place}: {error}") from None

    def _launch(self, device: torch.device, args: tuple[Any, ...]) -> None:
        from cuda.core import LaunchConfig
        from cuda.core import launch as launch_kernel

        context = _context(device.index)
        if device.index not in self.kernel._loaded:
            self.kernel._loaded[device.index] = _load(self.kernel, context)
        function, declared = self.kernel._loaded[device.index]
        values = self._typed(declared, args, device)
        if 0 in self.grid:
            return
        config = LaunchConfig(grid=self.grid, block=self.block, shmem_size=self.shared_bytes)
        stream = context.create_stream(_TorchStream(torch.cuda.current_stream(device)))
        launch_kernel(stream, config, function, *values)


@contextmanager
def _naming(path: Path, name: str = "") -> Iterator[None]:
    """Raise NoKernel, which names the file, where it or a kernel's declaration cannot be read."""
    try:
        yield
    except OSError as error:
        wanted = f", which is to have the kernel {name}" if name else ""
        raise NoKernel(f"{path}{wanted}: {error.strerror}") from None
    except ValueError as error:
        raise NoKernel(f"{path}: {error}") from None


class _TorchStream:
    """Shows torch's stream to cuda-core by its stream protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def _context(index: int) -> Any:
    """Return the device, with its context bound to this thread: autograd's threads have none."""
    bound: dict[int, Any] = vars(_bound).setdefault("devices", {})
    if index not in bound:
        from cuda.core import Device

        bound[index] = Device(index)
        bound[index].set_current()
    return bound[index]


def _load(kernel: Kernel, context: Any) -> tuple[Any, tuple[Parameter, ...]]:
    from cuda.core import ObjectCode

    major, minor = context.compute_capability
    cubin = kernel.compile(own_arch(10 * major + minor))
    return ObjectCode.from_cubin(cubin.code).get_kernel(cubin.symbol), cubin.parameters


def own_arch(capability: int) -> str:
    """Return the arch with the features of its own: "sm_90a" for 90, "sm_80" for 80."""
    return f"sm_{capability}" + ("a" if capability >= 90 else "")


def _emulator() -> Any:
    try:
        return importlib.import_module("nearlight.emulator")
    except ModuleNotFoundError as error:
        if error.name != "nearlight.emulator":
            raise
        raise NoEmulator(
            "CUDA C++ on CPU tensors needs the emulator, which this version of nearlight does not "
            "have; move the tensors to a GPU"
        ) from None


def _triple(size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(s, int) or s < 0 for s in sizes):
        raise ValueError(f"grid and block are one to three sizes of at least 0; got {size!r}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def compile_kernel(
    path: Path,
    name: str,
    arch: str,
    defines: Sequence[tuple[str, str]] = (),
    options: Sequence[tuple[str, Any]] = (),
) -> Cubin:
    """Compile one kernel of a .cu file for an arch; the result is cached on disk.

    The cache key holds the source, every header in reach of it but those of packages, their
    versions and the compiler's, defines, options and the arch. A file that includes a header by a
    macro (`#include HEADER`) is compiled each time, for only the compiler knows that header.

    Args:
        path: the .cu file.
        name: kernel, with template arguments where it is a template.
        arch: "sm_80", "sm_90a", ...
        defines: preprocessor definitions.
        options: further options of `cuda.core.ProgramOptions`.

    Returns:
        The machine code.

    Raises:
        CompileError: the compiler's messages, with the source's own lines.
        ValueError: an arch that is not of the form sm_NN, an option that is unknown or nearlight's
            own, or a kernel that the file does not define exactly once.
    """
    _check_options(options)
    return _compile_cached(Path(path), (name,), arch, defines, options, is_launched=True)


def compile_file(path: Path, arch: str, name: str = "") -> Cubin:
    """Compile all that a .cu file defines or instantiates, to be looked at and not launched.

    With the name of a kernel the code has its symbol, wherever a macro or a header defines it.
    """
    return _compile_cached(Path(path), (name,) if name else (), arch)


def _compile_cached(
    path: Path,
    names: Sequence[str],
    arch: str,
    defines: Sequence[tuple[str, str]] = (),
    options: Sequence[tuple[str, Any]] = (),
    is_launched: bool = False,
) -> Cubin:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"arch={arch!r}: expected a name like sm_80, sm_90a or sm_120")
    with _naming(path, *names):
        texts = sources(path)
        declared = parameters(texts[path.name], names[0]) if is_launched else ()
    kept = [f.name for f in fields(Cubin)]
    settings = (names, arch, tuple(defines), tuple(options), sorted(_FIXED.items()), kept)
    entry = _cache_entry(texts, settings)
    is_followed = not has_macro_header(texts)
    if is_followed and (content := compile_cache.load(entry)) is not None:
        *written, code = content.split(b"\0", 3)
        symbol, log, ptx = (text.decode() for text in written)
        return Cubin(code, symbol, arch, log, declared, ptx)
    code, symbol, log, ptx = _compile(path, texts[path.name], names, arch, defines, options)
    if is_followed:
        written = [text.encode() for text in (symbol, log, ptx)]
        compile_cache.store(entry, b"\0".join((*written, code)))
    return Cubin(code, symbol, arch, log, declared, ptx)


def _check_options(options: Sequence[tuple[str, Any]]) -> None:
    from cuda.core import ProgramOptions

    allowed = [f.name for f in fields(ProgramOptions) if f.name not in _NOT_OPTIONS]
    for name, _ in options:
        if name in _NOT_OPTIONS:
            raise ValueError(f"options: `{name}` is not for the caller: {_NOT_OPTIONS[name]}")
        if name not in allowed:
            near = get_close_matches(name, allowed, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; allowed are {', '.join(allowed)}"
            raise ValueError(f"options: there is no `{name}`{hint}")


def _cache_entry(texts: dict[str, str], settings: tuple[Any, ...]) -> Path:
    digest = hashlib.sha256(repr((settings, _compiler_version(), package_versions())).encode())
    for file, text in sorted(texts.items()):
        content = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        digest.update(f"{file}\0{content}\0".encode("utf-8", "surrogateescape"))
    return compile_cache.entry_of("cuda", f"{digest.hexdigest()}.cubin")


def _compile(
    path: Path,
    source: str,
    names: Sequence[str],
    arch: str,
    defines: Sequence[tuple[str, str]],
    options: Sequence[tuple[str, Any]],
) -> tuple[bytes, str, str, str]:
    """Return the code, the kernel's mangled name, the compiler's log and the PTX."""
    from cuda.core import Program, ProgramOptions

    settings = ProgramOptions(
        # with its folder, or NVRTC takes quoted headers from the working directory first
        name=str(path.absolute()),
        arch=arch,
        include_path=[str(folder) for folder in include_path(path)],
        define_macro=[tuple(d) for d in defines] or None,
        **_FIXED,
        **dict(options),
    )
    log, program = _Log(), None
    try:
        text = f'#line 1 "{path.name}"\n{source}'.encode("utf-8", "replace").decode()
        program = Program(text, "c++", settings)
        compiled = program.compile("cubin", name_expressions=names, logs=log)
    except Exception as error:
        # cuda-core wraps NVRTC's log into exceptions of several types, by version.
        text = f"{error}\n{log}".replace("\0", "")
        told = at_source_lines(text, path, _ptx(program) if "ptxas " in text else "")
        raise CompileError(f"{path.name} does not compile for {arch}:\n{told}") from None
    symbol = compiled.symbol_mapping[names[0]] if names else ""
    return (
        bytes(compiled.code),
        symbol if isinstance(symbol, str) else symbol.decode(),
        str(log),
        _ptx(program),
    )


def _ptx(program: Any) -> str:
    """Return what NVRTC assembled; cuda-core gives PTX only where there is a driver."""
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return text.decode("utf-8", "replace").rstrip("\0")


class _Log:
    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)

    def __str__(self) -> str:
        return "".join(self._parts).replace("\0", "").strip()


@lru_cache
def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC does not answer ({error}); try: {install_line('cuda')}")
    return major, minor

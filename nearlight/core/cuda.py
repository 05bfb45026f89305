"""CUDA C++ without a build step: compiled by NVRTC for a named arch, cached, launched by type.

    kernel = Kernel(Path("axpy.cu"), "axpy")
    kernel[(blocks,), (256,)](out, x, n, 2.0)

The same call on CPU tensors goes to the emulator. Compiling needs no GPU and no driver.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nearlight.core import env
from nearlight.core.cuda_arguments import Parameter, parameters, typed_arguments

INCLUDE = Path(__file__).parent / "include"
_INCLUDE_LINE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class CompileError(ValueError):
    """The compiler's own lines, with the file and line numbers of the source."""


@dataclass(frozen=True)
class Cubin:
    """Machine code for one arch: the bytes, the kernel's mangled name and the compiler's log."""

    code: bytes
    symbol: str
    arch: str
    log: str


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function of a .cu file, compiled on the first launch on each arch.

    Attributes:
        path: the .cu file.
        name: the function; with template arguments ("copy<float, 4>") where it is a template.
        defines: preprocessor definitions by name.
        options: further NVRTC options by the names of `cuda.core.ProgramOptions`.
    """

    path: Path
    name: str
    defines: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    _loaded: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameters, read from its source."""
        return parameters(self.path.read_text(encoding="utf-8"), self.name)

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
        values = typed_arguments(self.kernel.name, _parameters_of(self.kernel), args, device)
        if 0 in self.grid:
            return
        if device.type == "cpu":
            _emulator().launch(self.kernel, self.grid, self.block, args, self.shared_bytes)
            return
        with torch.cuda.device(device):
            self._launch(device, values)

    def _launch(self, device: torch.device, values: list[Any]) -> None:
        from cuda.core import LaunchConfig, launch

        context = _context(device.index)
        function = self.kernel._loaded.get(device.index)
        if function is None:
            function = _load(self.kernel, context)
            self.kernel._loaded[device.index] = function
        config = LaunchConfig(grid=self.grid, block=self.block, shmem_size=self.shared_bytes)
        stream = context.create_stream(_TorchStream(torch.cuda.current_stream(device)))
        launch(stream, config, function, *values)


class _TorchStream:
    """Shows torch's stream to cuda-core by its stream protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


@lru_cache
def _context(index: int) -> Any:
    from cuda.core import Device

    context = Device(index)
    context.set_current()
    return context


def _load(kernel: Kernel, context: Any) -> Any:
    from cuda.core import ObjectCode

    major, minor = context.compute_capability
    cubin = kernel.compile(f"sm_{major}{minor}" + ("a" if major >= 9 else ""))
    return ObjectCode.from_cubin(cubin.code).get_kernel(cubin.symbol)


def _emulator() -> Any:
    try:
        return importlib.import_module("nearlight.emulator")
    except ModuleNotFoundError as error:
        if error.name != "nearlight.emulator":
            raise
        raise RuntimeError(
            "CUDA C++ on CPU tensors needs the emulator, which this version of nearlight does not "
            "have; move the tensors to a GPU"
        ) from None


@lru_cache
def _parameters_of(kernel: Kernel) -> tuple[Parameter, ...]:
    return kernel.parameters


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

    The cache key holds the source, every header it includes by quotes, defines, options, the
    compiler's version and the arch. Entries are written aside and renamed, so any number of
    processes may compile the same kernel at once.

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
        ValueError: an arch that is not of the form sm_NN.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"arch={arch!r}: expected a name like sm_80, sm_90a or sm_120")
    digest = hashlib.sha256()
    for file, text in sorted(sources(path).items()):
        digest.update(f"{file}\0{text}\0".encode())
    digest.update(repr((name, arch, tuple(defines), tuple(options), _compiler_version())).encode())
    entry = Path(env.read("NEARLIGHT_CACHE")) / "cuda" / f"{digest.hexdigest()}.cubin"
    try:
        symbol, log, code = entry.read_bytes().split(b"\0", 2)
        return Cubin(code, symbol.decode(), arch, log.decode())
    except FileNotFoundError:
        pass
    cubin = _compile(path, name, arch, defines, options)
    _store(entry, b"\0".join((cubin.symbol.encode(), cubin.log.encode(), cubin.code)))
    return cubin


def sources(path: Path) -> dict[str, str]:
    """Return the text of a .cu file and of every header it includes by quotes, by file name."""
    path = Path(path)
    found: dict[str, str] = {path.name: path.read_text(encoding="utf-8")}
    waiting = [(path.parent, found[path.name])]
    while waiting:
        folder, text = waiting.pop()
        for header in _INCLUDE_LINE.findall(text):
            if header in found:
                continue
            file = next((f / header for f in (folder, INCLUDE) if (f / header).is_file()), None)
            if file is not None:
                found[header] = file.read_text(encoding="utf-8")
                waiting.append((file.parent, found[header]))
    return found


def _compile(
    path: Path,
    name: str,
    arch: str,
    defines: Sequence[tuple[str, str]],
    options: Sequence[tuple[str, Any]],
) -> Cubin:
    from cuda.core import Program, ProgramOptions

    source = path.read_text(encoding="utf-8")
    parameters(source, name)  # a kernel that is not there is named before the compiler starts
    log = _Log()
    try:
        program = Program(
            f'#line 1 "{path.name}"\n{source}',
            "c++",
            ProgramOptions(
                name=path.name,
                arch=arch,
                std="c++17",
                lineinfo=True,
                ptxas_options=["-v"],
                include_path=[str(INCLUDE), str(path.parent), *_system_includes()],
                define_macro=[tuple(d) for d in defines] or None,
                **dict(options),
            ),
        )
        compiled = program.compile("cubin", name_expressions=(name,), logs=log)
    except Exception as error:
        # cuda-core wraps NVRTC's log into exceptions of several types, by version.
        raise CompileError(f"{path.name} does not compile for {arch}:\n{error}\n{log}") from None
    symbol = compiled.symbol_mapping[name]
    return Cubin(
        bytes(compiled.code), symbol if isinstance(symbol, str) else symbol.decode(), arch, str(log)
    )


class _Log:
    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)

    def __str__(self) -> str:
        return "".join(self._parts).replace("\0", "").strip()


def _store(entry: Path, content: bytes) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=entry.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(name).replace(entry)


@lru_cache
def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC does not answer ({error}); try: pip install 'nearlight[cuda]'")
    return major, minor


@lru_cache
def _system_includes() -> tuple[str, ...]:
    """Folders with cuda_fp16.h and cuda_bf16.h: Triton's wheel carries them all."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if not (folder / "cuda_bf16.h").is_file():
        raise RuntimeError(
            "no CUDA headers in the installed triton; pip install 'triton>=3.6,<3.10'"
        )
    return (str(folder),)

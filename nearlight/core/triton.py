"""`jit`: one Triton kernel, compiled on CUDA tensors and interpreted on CPU tensors.

`compile_for` gives a kernel's machine code for any arch without a GPU.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from nearlight.core import compile_cache, interpreter, launch, machine_code
from nearlight.core.cuda_messages import at_source_lines
from nearlight.core.machine_code import MachineCode

if TYPE_CHECKING:
    from nearlight.core.op import KernelBuild


@cache
def launch_options() -> frozenset[str]:
    """Return the names a launch takes besides the kernel's arguments (num_warps, …)."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return frozenset(field.name for field in fields(CUDAOptions))


class Kernel(JITFunction):
    """A Triton kernel that runs where its tensors are; call it as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._checked_names: set[tuple[str, ...]] = set()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        # not by way of `run`: unpacking the arguments once more costs 0.3 µs of every launch
        return lambda *args, **kwargs: self._start(grid, False, args, kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch on the device of the first tensor argument, or interpret on CPU tensors."""
        return self._start(grid, warmup, args, kwargs)

    def _start(self, grid: Any, warmup: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = tuple(kwargs)
        if names not in self._checked_names:
            self._check_names(names)
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor):
            tensor = _first_tensor((*args, *kwargs.values()))
        index = -1 if tensor is None else tensor.get_device()
        if index < 0 and tensor is not None:
            if tensor.is_cpu:
                return self._interpret(grid, warmup, args, kwargs)
            if launch.is_describing():
                return launch.describe(self, args, kwargs, grid)
        run = JITFunction.run
        with interpreter.lock:  # a compilation must not see `tl` patched by another thread
            if tensor is not None and index != torch.cuda.current_device():
                with torch.cuda.device(tensor.device):
                    return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def _interpret(
        self, grid: Any, warmup: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if warmup:
            raise ValueError("warmup compiles, and CPU tensors are interpreted: nothing to do")
        arguments = {k: v for k, v in kwargs.items() if k in self.signature.parameters}
        return interpreter.launch(self, grid, args, arguments)

    def _check_names(self, names: tuple[str, ...]) -> None:
        allowed = [*self.signature.parameters, *sorted(launch_options())]
        for name in names:
            if name not in allowed:
                raise TypeError(
                    f"{self.__name__} has no argument or launch option `{name}`"
                    f"{_nearest(name, allowed)}. Arguments: {', '.join(self.signature.parameters)}."
                    " Launch options: num_warps, num_stages, num_ctas, maxnreg, …"
                )
        self._checked_names.add(names)


def _nearest(name: str, allowed: Iterable[str]) -> str:
    by_lower = {other.lower(): other for other in allowed}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean `{by_lower[close[0]]}`?" if close else ""


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def jit(
    function: Callable[..., Any] | None = None,
    *,
    do_not_specialize: Sequence[str] = (),
    do_not_specialize_on_alignment: Sequence[str] = (),
    noinline: bool = False,
) -> Any:
    """Make a Triton kernel that runs compiled on CUDA tensors and interpreted on CPU tensors.

    It is launched as `kernel[grid](*args, num_warps=4)`; a kernel may call it as a helper, like
    one of `triton.jit`.

    Args:
        function: the Python function; left out where options are given.
        do_not_specialize: integer arguments that do not make another kernel when they are 1 or a
            multiple of 16.
        do_not_specialize_on_alignment: the same for multiples of 16 alone.
        noinline: whether a helper stays a function of its own in the machine code.

    Returns:
        The kernel, or a decorator where `function` is left out.

    Example:
        >>> @jit
        ... def double(x_ptr, BLOCK: tl.constexpr):
        ...     offsets = tl.arange(0, BLOCK)
        ...     tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * 2)
        >>> double[(1,)](x, BLOCK=16)  # x: 16 elements, on a GPU or on the CPU
    """
    options = {
        "do_not_specialize": list(do_not_specialize),
        "do_not_specialize_on_alignment": list(do_not_specialize_on_alignment),
        "noinline": noinline,
    }
    if function is None:
        return lambda decorated: Kernel(decorated, **options)
    return Kernel(function, **options)


def compile_for(build: KernelBuild, arch: str, is_strict: bool = True) -> MachineCode:
    """Compile a kernel for an arch, without a GPU, and read its machine code.

    Pointers count as aligned to 16 bytes, as torch allocates them; "i64:16" in the signature says
    that a size or stride is a multiple of 16, "*bf16:1" that a pointer is not aligned. Results are
    kept in the folder NEARLIGHT_CACHE names, if it can be written.

    Args:
        build: kernel, signature, constants and launch options.
        arch: "sm_75" to "sm_121"; a letter behind it ("sm_90a") is accepted: Triton always
            compiles for the arch's own features where there are any.
        is_strict: refuse on sm_75 what the arch lacks; False is for a look at what becomes of it.

    Returns:
        Resources, instruction counts, cubin and PTX.

    Raises:
        ValueError: the arch is unknown, or is sm_75 and the kernel needs bf16 or a matrix product
            (Triton would compile it to scalar multiply-adds without a word).
        TypeError: the signature and the constants are not the kernel's arguments.
        RuntimeError: TRITON_INTERPRET is set, with which Triton cannot compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so Triton cannot compile: unset it (nearlight interprets on "
            "CPU tensors without it)"
        )
    capability = machine_code.capability_of(arch)
    types = _argument_types(build)
    refuses = is_strict and capability == 75
    if refuses:
        _refuse_on_turing(build, build.uses_tensor_cores, any("bf16" in t for t in types.values()))
    with interpreter.lock:  # nothing compiles while `tl` is patched
        entry = _cache_entry(build, types, arch)
        if (content := compile_cache.load(entry)) is not None:
            code = _from_json(content)
        else:
            code = _compile(build, types, capability, arch)
            compile_cache.store(entry, _to_json(code))
    if refuses:
        _refuse_on_turing(build, code.has_dot, "bf16" in code.ttir)
    return code


def _argument_types(build: KernelBuild) -> dict[str, str]:
    """Return the type of every argument in the kernel's order; "constexpr" for constants."""
    parameters = {p.name: p for p in build.kernel.params}
    for name in (*build.signature, *build.constants):
        if name not in parameters:
            near = _nearest(name, parameters)
            raise TypeError(f"{build.kernel.__name__} has no argument `{name}`{near}")
    types = {}
    for name, parameter in parameters.items():
        if name in build.constants or (parameter.has_default and name not in build.signature):
            types[name] = "constexpr"
        elif name in build.signature and not parameter.is_constexpr:
            types[name] = build.signature[name]
        else:
            place = "constants" if parameter.is_constexpr else "signature or constants"
            raise TypeError(f"{build.kernel.__name__}: argument `{name}` is missing in {place}")
    return types


def _refuse_on_turing(build: KernelBuild, has_product: bool, has_bf16: bool) -> None:
    if not has_product and not has_bf16:
        return
    what = "a matrix product, which Triton compiles to scalar multiply-adds" if has_product else ""
    what = what or "bf16, which the hardware lacks"
    raise ValueError(
        f"{build.kernel.__name__} uses {what} on sm_75: allowed there are fp16 and fp32 kernels "
        "without tl.dot; compile for sm_80 or later"
    )


def _compile(build: KernelBuild, types: dict[str, str], capability: int, arch: str) -> MachineCode:
    attributes = {}
    for index, kind in enumerate(types.values()):
        divisor = int(kind.partition(":")[2] or (16 if kind.startswith("*") else 1))
        if divisor % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=build.kernel,
        signature={name: kind.partition(":")[0] for name, kind in types.items()},
        constexprs=_constants(build, types),
        attrs=attributes,
    )
    log = io.StringIO()
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        # ptxas tells its -v log only while it runs
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        try:
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options={
                    "num_warps": build.num_warps,
                    "num_stages": build.num_stages,
                    "enable_fp_fusion": build.enable_fp_fusion,
                },
            )
        except PTXASError as error:
            ptx = "//" + log.getvalue().partition("\n//")[2]  # which Triton has printed
            path = Path(build.kernel.fn.__code__.co_filename)
            raise PTXASError("\n" + at_source_lines(str(error), path, ptx)) from None
    return machine_code.read(
        compiled.asm["cubin"],
        log.getvalue(),
        compiled.metadata.name,
        arch=arch,
        dynamic_shared_bytes=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
        ttir=compiled.asm["ttir"],
    )


def _constants(build: KernelBuild, types: dict[str, str]) -> dict[str, Any]:
    """Return every compile-time constant; a default may come from another file than the kernel."""
    defaults = build.kernel.signature.parameters
    return {
        name: build.constants.get(name, defaults[name].default)
        for name, kind in types.items()
        if kind == "constexpr"
    }


def _cache_entry(build: KernelBuild, types: dict[str, str], arch: str) -> Path:
    key = (
        build.kernel.cache_key,
        triton.__version__,
        arch,
        sorted(types.items()),
        sorted((name, repr(value)) for name, value in _constants(build, types).items()),
        build.num_warps,
        build.num_stages,
        build.enable_fp_fusion,
        [field.name for field in fields(MachineCode)],
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return compile_cache.entry_of("triton", f"{digest}.json")


def _from_json(content: bytes) -> MachineCode:
    values = json.loads(content)
    return MachineCode(**{**values, "cubin": base64.b64decode(values["cubin"])})


def _to_json(code: MachineCode) -> bytes:
    values = {**vars(code), "cubin": base64.b64encode(code.cubin).decode()}
    return json.dumps(values).encode()

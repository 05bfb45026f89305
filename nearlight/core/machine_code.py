"""Read machine code without a GPU: what ptxas says of a kernel, and what nvdisasm counts in it.

Works for every cubin, of Triton or of CUDA C++. Registers, stack and spills come from the log of
`ptxas -v`, because only ptxas tells a spill from a local array (both are stack); the instructions
come from `nvdisasm -json`, because its text drops addresses of different width.
"""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from nearlight.core.errors import BadInput
from nearlight.core.hardware import find_gpu

# Shared memory that a block may ask for, in bytes, by compute capability. Source: CUDA C++
# programming guide, technical specifications per compute capability.
MAX_SHARED_BYTES = {
    75: 64 * 1024,
    80: 163 * 1024,
    86: 99 * 1024,
    87: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}

# What kernels are compiled for where no arch is named: their instructions differ.
ARCHES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BARRIERS = re.compile(r"used (\d+) barriers")

# Opcodes that reach global memory, or may (LD and ST find out at run time); LDGSTS copies on to
# shared memory. Copies by TMA move whole tiles and have no width.
GLOBAL_LOADS = ("LDG", "LD", "LDGSTS")
GLOBAL_STORES = ("STG", "ST")
TMA_COPIES = ("UTMALDG", "UTMASTG", "UBLKCP")
BARRIERS = ("BAR", "SYNCS")
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "UTMAREDG", "UBLKRED")
_WIDTHS = {
    "U8": 8,
    "S8": 8,
    "8": 8,
    "U16": 16,
    "S16": 16,
    "16": 16,
    "64": 64,
    "128": 128,
    "256": 256,
}

# Items of a cubin's `.nv.info.<kernel>`: three sizes of the largest and of the only block allowed.
_MAX_THREADS, _REQUIRED_THREADS = 0x05, 0x10
_SIZED = 0x04  # the form of an item that a payload follows


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of an SM, from the log of `ptxas -v`.

    Attributes:
        registers: 32-bit registers per thread.
        stack_bytes: local memory per thread: spills and arrays that are indexed at run time.
        spill_store_bytes: bytes of registers stored to the stack, as instructions, not as executed.
        spill_load_bytes: bytes loaded back.
        shared_bytes: static shared memory of a block.
        num_barriers: named barriers of a block.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    num_barriers: int = 0


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel for one arch.

    Attributes:
        name: the kernel's symbol.
        arch: "sm_90a".
        registers: 32-bit registers per thread.
        spill_store_bytes: bytes of spill stores; 0 where a stack only holds local arrays.
        spill_load_bytes: bytes of spill loads.
        stack_bytes: local memory per thread, spills and local arrays together.
        shared_bytes: shared memory of a block, static and dynamic.
        instructions: opcode with its modifiers ("LDG.E.128") to its count; NOP padding left out.
        cubin: the code itself.
        ptx: what it was assembled from, where known.
        num_barriers: named barriers of a block.
        num_threads: threads of a block that the code is bound to (`__launch_bounds__`, the warps
            of a Triton program); 0 where it says none.
        ttir: Triton's own representation of the kernel; "" for CUDA C++.
    """

    name: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int]
    cubin: bytes
    ptx: str = ""
    num_barriers: int = 0
    num_threads: int = 0
    ttir: str = ""

    @property
    def spill_bytes(self) -> int:
        """Bytes of spill stores and loads together."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def array_bytes(self) -> int:
        """Bytes of the stack that hold local arrays: each spilled register is stored once."""
        return max(self.stack_bytes - self.spill_store_bytes, 0)

    @property
    def matrix_instructions(self) -> int:
        """Instructions that run on tensor cores (HMMA, IMMA, QMMA, HGMMA, UTCHMMA, …)."""
        return sum(map(self.count, self.matrix_units))

    @property
    def has_dot(self) -> bool:
        """Whether a Triton source multiplies matrices, on whatever unit."""
        return "tt.dot" in self.ttir

    @property
    def matrix_units(self) -> tuple[str, ...]:
        """Opcodes of the instructions that run on tensor cores, without their modifiers."""
        plain = (op.split(".")[0] for op in self.instructions)
        return tuple(dict.fromkeys(op for op in plain if op.endswith("MMA")))

    def count(self, *opcodes: str) -> int:
        """Return how many instructions have one of the opcodes, whatever their modifiers."""
        starts = tuple(f"{opcode}." for opcode in opcodes)
        return sum(n for op, n in self.instructions.items() if f"{op}.".startswith(starts))

    def widths(self, opcodes: Sequence[str]) -> dict[int, int]:
        """Return the bits that each instruction moves for a thread, widest first, to its count."""
        found: Counter[int] = Counter()
        for op, number in self.instructions.items():
            plain, *modifiers = op.split(".")
            if plain in opcodes:
                found[next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 32)] += number
        return dict(sorted(found.items(), reverse=True))


def read(
    cubin: bytes,
    log: str,
    symbol: str | None = None,
    *,
    arch: str = "",
    dynamic_shared_bytes: int = 0,
    ptx: str = "",
    ttir: str = "",
) -> MachineCode:
    """Read one kernel of a cubin.

    Args:
        cubin: the machine code.
        log: what `ptxas -v` (NVRTC with the ptxas option `-v`) printed when it was assembled.
        symbol: mangled name of the kernel; may be left out where there is only one.
        arch: for which arch; taken from the cubin if left out.
        dynamic_shared_bytes: shared memory that the launch adds to the static one.
        ptx: the source of the assembly, kept for the reader.
        ttir: what Triton made of the source, kept for the reader.

    Returns:
        The kernel's resources and instruction counts.

    Raises:
        ValueError: the log or the cubin has no such kernel, or more than one and no symbol.
    """
    resources = _pick(parse_log(log), symbol, "the log of ptxas -v")
    found_arch, functions = disassemble(cubin)
    name, instructions = _pick(functions, symbol or resources[0], "the cubin")
    taken = resources[1]
    return MachineCode(
        name=name,
        arch=arch or found_arch,
        registers=taken.registers,
        spill_store_bytes=taken.spill_store_bytes,
        spill_load_bytes=taken.spill_load_bytes,
        stack_bytes=taken.stack_bytes,
        shared_bytes=taken.shared_bytes + dynamic_shared_bytes,
        instructions=instructions,
        cubin=cubin,
        ptx=ptx,
        num_barriers=taken.num_barriers,
        num_threads=num_threads(cubin, name),
        ttir=ttir,
    )


def _pick(found: Mapping[str, Any], symbol: str | None, where: str) -> tuple[str, Any]:
    if symbol is None and len(found) == 1:
        return next(iter(found.items()))
    if symbol is None or symbol not in found:
        names = ", ".join(found) or "none"
        raise ValueError(f"{where} has no kernel {symbol!r}; it has: {names}")
    return symbol, found[symbol]


def capability_of(arch: str) -> int:
    """Return 90 for "sm_90" and "sm_90a".

    Raises:
        ValueError: an arch without a row in `MAX_SHARED_BYTES`; what is meant, which may be the
            arch of a GPU, is named.
    """
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None or int(match[1]) not in MAX_SHARED_BYTES:
        known = [f"sm_{number}" + "a" * (number >= 90) for number in MAX_SHARED_BYTES]
        try:
            near = [find_gpu(arch).arch]
        except BadInput:
            near = get_close_matches(arch.lower(), known, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"arch={arch!r}: allowed are {', '.join(known)}, with or without the a{hint}"
        )
    return int(match[1])


def parse_log(log: str) -> dict[str, Resources]:
    """Return the resources of every kernel in a log of `ptxas -v`, by symbol."""
    kernels: dict[str, Resources] = {}
    entry, owner = "", ""
    stack: dict[str, tuple[int, int, int]] = {}
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _PROPERTIES.search(line):
            owner = match[1]
        elif match := _STACK.search(line):
            stack[owner] = (int(match[1]), int(match[2]), int(match[3]))
        elif entry and (match := _REGISTERS.search(line)):
            shared, barriers = _SHARED.search(line), _BARRIERS.search(line)
            kernels[entry] = Resources(
                int(match[1]),
                *stack.get(entry, (0, 0, 0)),
                int(shared[1]) if shared else 0,
                int(barriers[1]) if barriers else 0,
            )
            entry = ""
    return kernels


def num_threads(cubin: bytes, symbol: str) -> int:
    """Return the threads of a block that a kernel of a cubin is bound to; 0 where it says none."""
    info = _elf_section(cubin, f".nv.info.{symbol}")
    offset, found = 0, 0
    while offset < len(info):
        form, item, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            if item in (_MAX_THREADS, _REQUIRED_THREADS):
                found = math.prod(struct.unpack_from("<3I", info, offset))
            offset += size
    return found


def _elf_section(elf: bytes, name: str) -> bytes:
    """Return the content of a section of a 64-bit ELF file, b"" where there is none."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    names = sections[names_index][4]
    for start, _, _, _, offset, length in sections:
        if elf[names + start :].startswith(name.encode() + b"\0"):
            return elf[offset : offset + length]
    return b""


def disassemble(cubin: bytes) -> tuple[str, dict[str, dict[str, int]]]:
    """Return a cubin's arch and, for each function, how often each opcode stands in it.

    Raises:
        ValueError: no nvdisasm here takes the bytes for machine code.
        RuntimeError: there is no nvdisasm.
    """
    return _disassemble(cubin, tools("nvdisasm"))


@lru_cache(maxsize=1)  # a file's kernels are read one after another from one cubin
def _disassemble(cubin: bytes, paths: tuple[str, ...]) -> tuple[str, dict[str, dict[str, int]]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for path in paths:
            command = [path, "-json", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            # 13.x warns on stderr about cubins of ptxas 12.x; its output is complete
            if done.returncode == 0 and done.stdout.lstrip().startswith("["):
                break
        else:
            raise ValueError(
                f"nvdisasm cannot read {len(cubin)} bytes of machine code: {done.stderr.strip()} "
                "For a newer arch: pip install --upgrade nvidia-cuda-nvdisasm"
            )
    header, functions = json.loads(done.stdout)
    version = header["SM"]["version"]
    counts = {
        function["function-name"]: dict(
            Counter(
                instruction["opcode"]
                for instruction in function["sass-instructions"]
                if instruction["opcode"] != "NOP"
            )
        )
        for function in functions
    }
    return f"sm_{version['major']}{version['minor']}", counts


@cache
def tools(name: str) -> tuple[str, ...]:
    """Return the paths of a binary tool: Triton's own, then that of NVIDIA's wheel or toolkit.

    Triton's may be older than an arch that its ptxas knows.

    Args:
        name: "nvdisasm" or "cuobjdump".

    Raises:
        RuntimeError: neither is installed.
    """
    import triton
    from cuda.pathfinder import find_nvidia_binary_utility

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    installed = find_nvidia_binary_utility(name)
    paths = ([str(bundled)] if bundled.is_file() else []) + ([installed] if installed else [])
    if not paths:
        raise RuntimeError(f"{name} is not installed: pip install nvidia-cuda-{name}")
    return tuple(paths)

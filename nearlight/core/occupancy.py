"""How many blocks of a kernel an SM holds at once, and what keeps it from holding more.

Source: NVIDIA's rules as its `cuda_occupancy.h` applies them; the test holds every arch to that
header, compiled. Registers are given to warps, in each of the SM's four partitions; shared memory
to blocks, out of what the carve-out leaves beside L1, with a kilobyte of the driver's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearlight.core.machine_code import MAX_SHARED_BYTES, capability_of

_WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
_MAX_REGISTERS_PER_THREAD = 256
_REGISTERS_PER_SM = 65536
_REGISTER_UNIT = 256  # registers are given to a warp in multiples of it
_PARTITIONS_PER_SM = 4
# Sizes of shared memory beside L1, up to the largest that an arch has.
_CARVE_OUTS_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)
_TURING_CARVE_OUTS_KIB = (32, 64)


@dataclass(frozen=True)
class Sm:
    """Limits of one SM that differ between archs.

    Attributes:
        max_warps: warps resident at once.
        max_blocks: blocks resident at once.
        shared_kib: largest shared memory, the driver's own included.
        num_barriers: named barriers for all blocks; None where they never limit.
    """

    max_warps: int
    max_blocks: int
    shared_kib: int
    num_barriers: int | None = None


# By compute capability. Source: CUDA C++ programming guide, technical specifications per compute
# capability; barriers: `cuda_occupancy.h`.
SMS = {
    75: Sm(32, 16, 64),
    80: Sm(64, 32, 164),
    86: Sm(48, 16, 100),
    87: Sm(48, 16, 164),
    89: Sm(48, 24, 100),
    90: Sm(64, 32, 228, num_barriers=64),
    100: Sm(64, 32, 228, num_barriers=64),
    103: Sm(64, 32, 228, num_barriers=64),
    120: Sm(48, 24, 100, num_barriers=24),
    121: Sm(48, 24, 100, num_barriers=24),
}


@dataclass(frozen=True)
class Occupancy:
    """What an SM holds of one kernel.

    Attributes:
        blocks_per_sm: blocks at once; 0 where the kernel cannot be launched.
        warps_per_sm: their warps.
        share: of the warps that an SM can hold.
        limited_by: "warps" (all that an SM can hold), "registers", "shared memory", "blocks",
            "barriers", or several of them.
    """

    blocks_per_sm: int
    warps_per_sm: int
    share: float
    limited_by: str


def occupancy(
    arch: str,
    registers: int,
    num_threads: int,
    shared_bytes: int,
    *,
    num_barriers: int = 1,
    carve_out: float = 1.0,
) -> Occupancy:
    """Return how many blocks of a kernel an SM holds at once.

    Args:
        arch: "sm_75" to "sm_121"; a letter behind it changes nothing.
        registers: 32-bit registers per thread.
        num_threads: threads of a block.
        shared_bytes: shared memory of a block, static and dynamic.
        num_barriers: named barriers of a block.
        carve_out: share of the largest shared memory that the kernel prefers; the driver's
            default is all of it.

    Raises:
        ValueError: an unknown arch, a number below 0 (of threads: below 1), or a carve-out that is
            no share.

    Example:
        >>> occupancy("sm_90a", registers=128, num_threads=256, shared_bytes=96 * 1024)
        Occupancy(blocks_per_sm=2, warps_per_sm=16, share=0.25, limited_by='registers and shared memory')
    """  # noqa: E501  # an example's answer stands on one line
    if not 0 <= carve_out <= 1:
        raise ValueError(f"carve_out={carve_out}: allowed are shares from 0 to 1")
    if num_threads < 1 or min(registers, shared_bytes, num_barriers) < 0:
        raise ValueError(
            f"occupancy of {num_threads} threads, {registers} registers, {shared_bytes} bytes and "
            f"{num_barriers} barriers: allowed are at least one thread and nothing below 0"
        )
    capability = capability_of(arch)
    sm = SMS[capability]
    warps = -(-num_threads // _WARP_SIZE)
    fits = num_threads <= MAX_THREADS_PER_BLOCK
    limits = {
        "warps": sm.max_warps // warps if fits else 0,
        "registers": _blocks_by_registers(registers, warps),
        "shared memory": _blocks_by_shared_memory(capability, shared_bytes, carve_out),
        "blocks": sm.max_blocks,
    }
    if sm.num_barriers and num_barriers:
        limits["barriers"] = sm.num_barriers // num_barriers
    blocks = min(limit for limit in limits.values() if limit is not None)
    reasons = [name for name, limit in limits.items() if limit == blocks]
    share = blocks * warps / sm.max_warps
    return Occupancy(blocks, blocks * warps, share, " and ".join(reasons))


def _blocks_by_registers(registers: int, warps: int) -> int | None:
    """Return the blocks that the registers suffice for; None where there is no limit."""
    if registers == 0:
        return None
    per_warp = _round_up(registers * _WARP_SIZE, _REGISTER_UNIT)
    # The launch is checked as if a block filled all partitions alike.
    is_refused = per_warp * _round_up(warps, _PARTITIONS_PER_SM) > _REGISTERS_PER_SM
    if is_refused or registers > _MAX_REGISTERS_PER_THREAD:
        return 0
    per_partition = _REGISTERS_PER_SM // _PARTITIONS_PER_SM // per_warp
    return per_partition * _PARTITIONS_PER_SM // warps


def _blocks_by_shared_memory(capability: int, shared_bytes: int, carve_out: float) -> int | None:
    """Return the blocks that the shared memory suffices for; None where there is no limit."""
    is_turing = capability < 80
    reserved_bytes = 0 if is_turing else 1024
    taken = _round_up(shared_bytes + reserved_bytes, 256 if is_turing else 128)
    if taken == 0:
        return None
    if taken > MAX_SHARED_BYTES[capability] + reserved_bytes:
        return 0
    preferred = int(carve_out * SMS[capability].shared_kib * 1024)
    sizes = _TURING_CARVE_OUTS_KIB if is_turing else _CARVE_OUTS_KIB
    # A preference that does not hold one block is overruled.
    return next(kib * 1024 for kib in sizes if kib * 1024 >= max(preferred, taken)) // taken


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit

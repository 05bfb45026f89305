"""Builds of either language: compiled for an arch without a GPU, and held to their budgets."""

from __future__ import annotations

from nearlight.core import cuda, machine_code, triton
from nearlight.core.machine_code import MachineCode
from nearlight.core.op import KernelBuild


def compile_build(build: KernelBuild, arch: str) -> MachineCode:
    """Compile a kernel for an arch, with the arch's own features, and read its machine code.

    Args:
        build: of a Triton kernel or of a CUDA C++ one.
        arch: "sm_75" to "sm_121"; a letter behind it changes nothing.

    Raises:
        ValueError: the arch is unknown, the kernel cannot run on it, or the compiler refuses the
            source (`nearlight.core.cuda.CompileError` with its lines).
        TypeError: a signature that does not fit the kernel.
    """
    if not isinstance(build.kernel, cuda.Kernel):
        return triton.compile_for(build, arch)
    capability = machine_code.capability_of(arch)
    cubin = build.kernel.compile(cuda.own_arch(capability))
    return machine_code.read(
        cubin.code,
        cubin.log,
        cubin.symbol,
        arch=arch,
        dynamic_shared_bytes=build.shared_bytes,
        ptx=cubin.ptx,
    )


def check_budget(build: KernelBuild, code: MachineCode) -> list[str]:
    """Return what the machine code does that its build does not allow, one line each."""
    violations = []
    if code.registers > build.max_registers:
        violations.append(f"{code.registers} registers per thread, allowed {build.max_registers}")
    if code.spill_bytes > build.max_spill_bytes:
        violations.append(
            f"{code.spill_store_bytes} bytes of spill stores and {code.spill_load_bytes} of spill "
            f"loads, allowed {build.max_spill_bytes} together"
        )
    if build.uses_tensor_cores and code.matrix_instructions == 0:
        violations.append("no matrix instruction, though the kernel is said to use tensor cores")
    limit = machine_code.MAX_SHARED_BYTES[machine_code.capability_of(code.arch)]
    if code.shared_bytes > limit:
        violations.append(f"{code.shared_bytes} bytes of shared memory, a block has {limit}")
    return [f"{build.name} on {code.arch}: {violation}" for violation in violations]

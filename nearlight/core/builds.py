"""Builds of either language: compiled for an arch without a GPU, and held to their budgets."""

from __future__ import annotations

from nearlight.core import cuda, machine_code, triton
from nearlight.core.machine_code import MachineCode
from nearlight.core.occupancy import MAX_THREADS_PER_BLOCK, occupancy
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
    no_launch = (past_block_limits(build, code), past_launch_bounds(build, code))
    violations += [what for what, _ in no_launch if what]
    return [f"{build.name} on {code.arch}: {violation}" for violation in violations]


def past_block_limits(build: KernelBuild, code: MachineCode) -> tuple[str, str]:
    """Return what a block asks for that no SM has, and what to do; "" twice where one has it."""
    is_cuda = isinstance(build.kernel, cuda.Kernel)
    limit = machine_code.MAX_SHARED_BYTES[machine_code.capability_of(code.arch)]
    if code.shared_bytes > limit:
        fix = "take less shared memory" if is_cuda else "take a smaller tile or fewer stages"
        return f"{code.shared_bytes} bytes of shared memory, a block has {limit}", fix
    threads = build.num_threads or code.num_threads
    fix = "launch fewer threads in a block" if is_cuda else "take fewer warps (num_warps)"
    if threads > MAX_THREADS_PER_BLOCK:
        return f"{threads} threads, a block has {MAX_THREADS_PER_BLOCK}", fix
    if not threads or past_launch_bounds(build, code)[0]:
        return "", ""
    held = occupancy(
        code.arch, code.registers, threads, code.shared_bytes, num_barriers=code.num_barriers
    )
    if held.blocks_per_sm:
        return "", ""
    bound = f", or bound its registers by __launch_bounds__({threads})" if is_cuda else ""
    return f"{threads} threads × {code.registers} registers, more than an SM has", fix + bound


def past_launch_bounds(build: KernelBuild, code: MachineCode) -> tuple[str, str]:
    """Return by how much a launch is past its kernel's `__launch_bounds__`, and what to do."""
    threads, allowed = build.num_threads, code.num_threads
    if not 0 < allowed < threads:
        return "", ""
    is_raised = threads <= MAX_THREADS_PER_BLOCK
    raised = f", or raise __launch_bounds__ to {threads}" if is_raised else ""
    what = f"{threads} threads, __launch_bounds__ allows {allowed}"
    return what, f"launch at most {allowed} threads in a block{raised}"

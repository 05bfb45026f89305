"""Occupancy against NVIDIA's own header, compiled: every arch, thousands of launches."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from nearlight.core.machine_code import MAX_SHARED_BYTES
from nearlight.core.occupancy import SMS, Occupancy, occupancy

HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
PROGRAM = r"""
#include <climits>
#include <cstdio>
#include <cstring>
#include "cuda_occupancy.h"
int main() {
  int arch, warps, kib, optin, registers, threads, shared_static, shared, barriers, carve_out;
  while (scanf("%d %d %d %d %d %d %d %d %d %d", &arch, &warps, &kib, &optin, &registers, &threads,
               &shared_static, &shared, &barriers, &carve_out) == 10) {
    cudaOccDeviceProp device;
    device.computeMajor = arch / 10;
    device.computeMinor = arch % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = kib * 1024;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = optin;
    device.reservedSharedMemPerBlock = arch < 80 ? 0 : 1024;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = shared_static;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared;
    kernel.numBlockBarriers = barriers;
    cudaOccDeviceState state;
    state.carveoutConfig = carve_out;
    cudaOccResult result;
    cudaOccError error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    printf("%d %u\n", error ? -error : result.activeBlocksPerMultiprocessor,
           error ? 0 : result.limitingFactors);
  }
}
"""
FACTORS = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8, "barriers": 16}


def _launches(seed, count):
    """Draw launches, half of them at the sizes where a limit jumps."""
    draw = random.Random(seed)
    for _ in range(count):
        arch = draw.choice(list(SMS))
        limit = MAX_SHARED_BYTES[arch]
        threads = draw.choice([draw.randint(1, 1030), 32 * draw.randint(1, 32), 64, 128])
        edge = limit // draw.randint(1, 32) + draw.choice([-1024, -128, 0, 1, 128])
        shared = max(0, draw.choice([0, 0, draw.randint(0, limit + 2048), edge]))
        static = draw.choice([0, draw.randint(0, min(shared, 48 * 1024))])
        registers = draw.choice([draw.randint(0, 258), 8 * draw.randint(1, 32), 16])
        carve_out = draw.choice([100, 100, -1, draw.randint(0, 100)])
        yield arch, registers, threads, static, shared - static, draw.randint(0, 16), carve_out


def test_equals_nvidias_header_on_every_arch(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile NVIDIA's header with")
    (tmp_path / "occupancy.cpp").write_text(PROGRAM)
    program = tmp_path / "occupancy"
    command = ["g++", "-w", "-I", str(HEADERS), "-o", program, tmp_path / "occupancy.cpp"]
    subprocess.run(command, check=True)
    launches = list(_launches(seed=20, count=20_000))
    lines = [
        f"{arch} {SMS[arch].max_warps} {SMS[arch].shared_kib} {MAX_SHARED_BYTES[arch]} {registers} "
        f"{threads} {static} {dynamic} {barriers} {carve_out}"
        for arch, registers, threads, static, dynamic, barriers, carve_out in launches
    ]
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(answers) == len(launches)
    for launch, (blocks, factors) in zip(launches, answers, strict=True):
        arch, registers, threads, static, dynamic, barriers, carve_out = launch
        ours = occupancy(
            f"sm_{arch}",
            registers,
            threads,
            static + dynamic,
            num_barriers=barriers,
            carve_out=1.0 if carve_out < 0 else carve_out / 100,
        )
        assert ours.blocks_per_sm == blocks, launch
        named = sum(FACTORS[name] for name in ours.limited_by.split(" and "))
        # Where barriers allow the fewest blocks, the header goes on naming what came before them.
        assert named == factors or named == 16 == factors & 16, launch
    # the draw must reach every limit, and launches that fit and that do not
    assert {arch for arch, *_ in launches} == set(SMS)
    assert {blocks for blocks, _ in answers} >= {0, 1, 2, 16, 24, 32}
    for factor in FACTORS.values():
        assert sum(bool(factors & factor) for _, factors in answers) > 100


def test_share_and_limit_are_named():
    both = "registers and shared memory"
    assert occupancy("sm_90a", 128, 256, 96 * 1024) == Occupancy(2, 16, 0.25, both)
    assert occupancy("sm_120", 32, 128, 0) == Occupancy(12, 48, 1.0, "warps")
    assert occupancy("sm_86", 40, 256, 100 * 1024) == Occupancy(0, 0, 0.0, "shared memory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm_95", 32, 128, 0), "did you mean"),
        (("sm_90", 32, 0, 0), "at least one thread"),
        (("sm_90", 32, 128, -1), "nothing below 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        occupancy(*arguments)

"""Hold the workbench's own measurements to the GPU's: run it on the GPU whose results are kept.

    python tools/prove_tools.py timer | small | resources | all

timer: a kernel against itself, and against itself with 3% more bytes, a hundred times each.
small: kernels of 4 to 10 µs by the bench's timer and by Nsight Compute.
resources: registers, local memory and occupancy of every kernel, by inspect and by the driver.
Results go to nearlight/data/results/<gpu>/.
"""

import csv
import os
import statistics
import subprocess
import sys

import torch

from nearlight.core import timing
from nearlight.core.builds import compile_build
from nearlight.core.hardware import detect_gpu
from nearlight.core.occupancy import occupancy
from nearlight.core.report import Report
from nearlight.core.versions import PACKAGE, versions
from nearlight.ops import OPS

RUNS = 100
MIB = 1 << 20
MORE_BYTES = 1.03
# 2 MiB take 4 µs.
TIMER_MIB = (2, 64, 256)
# rows × columns of row operations that take 4 to 10 µs.
SMALL = {"mul": (4096, 1024), "softmax": (2048, 1024), "layer_norm": (2048, 2048)}
NCU_LAUNCHES = 15


def main() -> None:
    """Run what the command line names."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else "all"
    if wanted == "--ncu":
        run_for_ncu(sys.argv[2])
        return
    measures = {"timer": timer, "small": small, "resources": resources}
    if wanted not in (*measures, "all"):
        sys.exit(f"tools/prove_tools.py {wanted}: expected {', '.join(measures)} or all")
    for name, measure in measures.items():
        if wanted in (name, "all"):
            save(name, *measure())


def save(name: str, answer: str, rows: list[dict[str, object]]) -> None:
    """Write a result and print its first line."""
    gpu = detect_gpu()
    assert gpu is not None
    report = Report(
        verb="bench", answer=answer, target=name, gpu=gpu.key, versions=versions(True), rows=rows
    )
    report.save_json(PACKAGE / "data" / "results" / gpu.key / f"tools-{name}.json")
    print(answer)
    for row in rows:
        print("  ", row)


def timer() -> tuple[str, list[dict[str, object]]]:
    """Compare a copy with itself and with one of 3% more bytes, a hundred times each."""
    rows: list[dict[str, object]] = []
    for size in TIMER_MIB:
        for factor in (1.0, MORE_BYTES):
            if factor != 1.0 and size == min(TIMER_MIB):
                continue  # the launch is half of it: 3% more bytes are no 3% of its time
            verdicts = [verdict(size, factor) for _ in range(RUNS)]
            counts = {v: verdicts.count(v) for v in ("slower", "no difference", "faster")}
            rows.append({"mib": size, "bytes_factor": factor, "runs": RUNS, **counts})
    same = min(row["no difference"] for row in rows if row["bytes_factor"] == 1.0)
    more = min(row["slower"] for row in rows if row["bytes_factor"] != 1.0)
    return (
        f"A/A says no difference in at least {same} of {RUNS} runs, 3% more bytes are called "
        f"slower in at least {more}",
        rows,
    )


def verdict(size_mib: int, factor: float) -> str:
    """Say whether a copy of `factor` times the bytes is slower than one of `size_mib`."""

    def copies(factor: float) -> list[object]:
        num_bytes = int(size_mib * MIB * factor) // 16 * 16
        return [x[:num_bytes].clone for x in sources]

    sources = [
        torch.randint(0, 255, (2 * size_mib * MIB,), dtype=torch.uint8, device="cuda")
        for _ in range(2)
    ]
    timed = timing.compare({"a": copies(1.0), "b": copies(factor)})
    return timing.difference(timed["b"], timed["a"])[0]


def small_call(name: str):
    """Return a call of a short kernel."""
    x = torch.randn(SMALL[name], device="cuda", dtype=torch.bfloat16)
    weight, out = torch.ones_like(x[0]), torch.empty_like(x)
    return {
        "mul": lambda: torch.mul(x, x, out=out),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, weight.shape, weight),
    }[name]


def run_for_ncu(name: str) -> None:
    """Launch a short kernel on a GPU whose clocks are up; Nsight Compute watches the last ones."""
    call = small_call(name)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        a @ a
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(NCU_LAUNCHES):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def small() -> tuple[str, list[dict[str, object]]]:
    """Time short kernels by the bench's timer and by Nsight Compute."""
    rows: list[dict[str, object]] = []
    for name, shape in SMALL.items():
        timed = timing.time_call(small_call(name), flush_bytes=0)  # as ncu: caches warm
        ncu_us = by_ncu(name)
        rows.append(
            {
                "kernel": name,
                "shape": f"{shape[0]}x{shape[1]}",
                "timer_us": timed.median_us,
                "method": timed.method,
                "ncu_us": ncu_us,
                "error": timed.median_us / ncu_us - 1,
            }
        )
    worst = max(abs(row["error"]) for row in rows)
    times = sorted(row["ncu_us"] for row in rows)
    took = f"{times[0]:.1f} to {times[-1]:.1f} µs"
    return f"kernels of {took} are timed within {worst:.1%} of Nsight Compute", rows


def by_ncu(name: str) -> float:
    """Return the median of gpu__time_duration in µs."""
    command = [
        "ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off",
        "--metrics", "gpu__time_duration.sum", "--csv", "--page", "raw", "--print-units", "base",
        sys.executable, __file__, "--ncu", name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    times = [row["gpu__time_duration.sum"] for row in csv.DictReader(table)]
    nanoseconds = [float(time.replace(",", "")) for time in times if time[:1].isdigit()]
    if len(nanoseconds) < NCU_LAUNCHES:
        sys.exit(f"ncu gave {len(nanoseconds)} of {NCU_LAUNCHES} times:\n{done.stdout[-2000:]}")
    return statistics.median(nanoseconds) / 1e3


def resources() -> tuple[str, list[dict[str, object]]]:
    """Compare what inspect says of every kernel with what the driver says."""
    rows: list[dict[str, object]] = []
    gpu = detect_gpu()
    assert gpu is not None
    for name, op in OPS.items():
        for build in op.builds(gpu.arch):
            code = compile_build(build, gpu.arch)
            threads = build.num_threads or 32 * build.num_warps
            own = occupancy(gpu.arch, code.registers, threads, code.shared_bytes)
            driver = from_driver(code, threads)
            ours = (code.registers, code.stack_bytes, own.blocks_per_sm)
            rows.append(
                {
                    "op": name,
                    "kernel": code.name,
                    "constants": {k: str(v) for k, v in build.constants.items()},
                    "threads": threads,
                    "shared_bytes": code.shared_bytes,
                    "spill_bytes": code.spill_bytes,
                    **dict(zip(("registers", "local_bytes", "blocks_per_sm"), ours, strict=True)),
                    "driver": list(driver),
                    "equal": ours == driver,
                }
            )
    equal = sum(bool(row["equal"]) for row in rows)
    return (
        f"registers, local memory and blocks per SM equal the driver's for {equal} of "
        f"{len(rows)} kernels",
        rows,
    )


def from_driver(code, threads: int) -> tuple[int, int, int]:
    """Return registers, local memory and blocks per SM of a kernel, as the driver has them."""
    from cuda.bindings import driver

    def done(result):
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    module = done(driver.cuModuleLoadData(code.cubin))
    function = done(driver.cuModuleGetFunction(module, code.name.encode()))
    attribute = driver.CUfunction_attribute

    def value(name):
        return done(driver.cuFuncGetAttribute(getattr(attribute, name), function))

    static = value("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
    dynamic = code.shared_bytes - static
    done(
        driver.cuFuncSetAttribute(
            function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic
        )
    )
    blocks = done(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic))
    found = value("CU_FUNC_ATTRIBUTE_NUM_REGS"), value("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
    return (*found, blocks)


if __name__ == "__main__":
    main()

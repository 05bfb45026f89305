"""Measure what this GPU reaches: copies, matrix products, attention, launches, host costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from nearlight.core import ceilings, timing
from nearlight.core.ceilings import AttentionPoint, Ceilings, Point
from nearlight.core.hardware import Gpu, require_gpu
from nearlight.core.progress import Progress, silent
from nearlight.core.report import Report, require_writable, write_aside
from nearlight.core.versions import versions

COPY_BYTES = tuple(1 << shift for shift in (20, 22, 24, 26, 28, 30, 32))
MATMUL_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
PIPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32,
         "fp32": torch.float32, "fp8": torch.float8_e4m3fn}  # fmt: skip
# The slow pipes are measured up to this size; a larger product takes seconds and says the same.
LARGEST_FP32 = 8192
# Heads by head width, so that every attention call has about the same work.
HEADS = {64: 32, 128: 16, 256: 8}
SEQ_LENS = (2048, 8192)
ATTENTION_TOKENS = 16384
REPEATS = 10
FLOOR_LAUNCHES = 200

Call = Callable[[], Any]


def calibrate(into_repo: bool = False, progress: Progress = silent) -> Report:
    """Measure the ceilings of this machine's GPU and store them; takes about a minute.

    Args:
        into_repo: write into the package's data instead of the user's folder.
        progress: told what goes on, and where the file was written.

    Returns:
        A report with the ceilings as rows.

    Raises:
        MissingPart: there is no GPU.
    """
    gpu = require_gpu("calibrate", "nearlight predict TARGET --gpu NAME needs none")
    path = ceilings.package_path(gpu.key) if into_repo else ceilings.user_path(gpu.key)
    require_writable(path)
    measured = measure(gpu, progress)
    write_aside(path, json.dumps(measured.to_dict(), indent=1) + "\n")
    progress(f"written to {path}")
    copy = measured.stream[-1].rate
    return Report(
        verb="calibrate",
        answer=f"{gpu.name}: copies {copy / 1e3:.2f} TB/s, "
        f"{copy / gpu.memory_gbps:.0%} of the datasheet",
        gpu=gpu.key,
        versions=dict(measured.versions),
        rows=rows(measured, gpu),
        next="next: nearlight predict TARGET uses these numbers from now on",
    )


def measure(gpu: Gpu, progress: Progress = silent) -> Ceilings:
    """Measure the current GPU and return its ceilings."""
    progress("launches")
    floor_us = _kernel_floor_us()
    return Ceilings(
        gpu=gpu.key,
        source="torch's own kernels on random data, median, kernel floor taken off; streams: "
        "copies, bytes read plus written; attention: SDPA as torch chooses, causal counted half",
        versions=versions(on_gpu=True),
        kernel_floor_us=floor_us,
        host_us=_host_costs(),
        stream=tuple(_copies(floor_us, progress)),
        matmul={pipe: tuple(_products(gpu, pipe, floor_us, progress))
                for pipe in PIPES if pipe in gpu.peaks_tflops},
        attention=tuple(_attention(floor_us, progress)),
    )  # fmt: skip


def _kernel_floor_us() -> float:
    """Return what one of many tiny kernels takes on a stream that never waits for the host.

    A graph would start them closer together than an eager program ever does.
    """
    tiny = torch.zeros(1, device="cuda")

    def launch_many() -> None:
        for _ in range(FLOOR_LAUNCHES):
            tiny.add_(1)

    return timing.time_call(launch_many, flush_bytes=0).median_us / FLOOR_LAUNCHES


def _rate(work: float, timed: timing.Timing, floor_us: float) -> float:
    """Return work per second with the floor taken off; at most half of a time is floor."""
    return work / (max(timed.median_us - floor_us, timed.median_us / 2) * 1e-6)


def _copies(floor_us: float, progress: Progress) -> Iterator[Point]:
    for num_bytes in COPY_BYTES:
        progress(f"copy of {num_bytes >> 20} MiB")
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        timed = timing.time_call(partial(target.copy_, source), min_repeats=REPEATS)
        yield Point(2 * num_bytes, _rate(2 * num_bytes, timed, floor_us) / 1e9)


def _products(gpu: Gpu, pipe: str, floor_us: float, progress: Progress) -> Iterator[Point]:
    dtype = PIPES[pipe]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = pipe == "tf32"
    try:
        for size in MATMUL_SIZES:
            if dtype == torch.float32 and size > LARGEST_FP32:
                continue
            progress(f"{pipe} matrix product of {size}³")
            call = _product(size, dtype)
            flops = 2 * size**3
            yield Point(
                flops,
                _rate(flops, timing.time_call(call, min_repeats=REPEATS, max_seconds=1.0), floor_us)
                / 1e12,
            )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(size: int, dtype: torch.dtype) -> Callable[[], Any]:
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    if dtype != torch.float8_e4m3fn:
        a, b = a.to(dtype), b.to(dtype)
        return lambda: torch.mm(a, b)
    a8, b8, one = a.to(dtype), b.to(dtype).t(), torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)


def _attention(floor_us: float, progress: Progress) -> Iterator[AttentionPoint]:
    for head_dim, heads in HEADS.items():
        for seq_len in SEQ_LENS:
            for is_causal in (False, True):
                progress(f"attention, head width {head_dim}, {seq_len} tokens")
                shape = (ATTENTION_TOKENS // seq_len, heads, seq_len, head_dim)
                flops = 4 * shape[0] * heads * seq_len**2 * head_dim / (2 if is_causal else 1)
                forward, backward = _attention_calls(shape, is_causal)
                for is_backward, call, factor in ((False, forward, 1.0), (True, backward, 2.5)):
                    timed = timing.time_call(call, min_repeats=REPEATS, max_seconds=0.5)
                    rate = _rate(factor * flops, timed, floor_us) / 1e12
                    yield AttentionPoint(head_dim, is_causal, is_backward, seq_len, rate)


def _attention_calls(shape: tuple[int, ...], is_causal: bool) -> tuple[Call, Call]:
    """Return forward and backward of one attention on fresh random tensors."""
    q, k, v, upstream = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=is_causal)
    out = forward()
    return forward, lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)


def _host_costs() -> dict[str, float]:
    x = torch.randn(64, device="cuda")
    out = torch.empty_like(x)
    return {
        "torch_op": timing.host_cost_us(lambda: torch.mul(x, x)),
        "torch_op_out": timing.host_cost_us(lambda: torch.mul(x, x, out=out)),
    }


def rows(measured: Ceilings, gpu: Gpu) -> list[dict[str, Any]]:
    """Return the ceilings as a table."""
    table: list[dict[str, Any]] = [
        {"what": f"copy of {point.size / 2**21:.0f} MiB", "rate": point.rate, "unit": "GB/s",
         "of datasheet": f"{point.rate / gpu.memory_gbps:.0%}"}
        for point in measured.stream
    ]  # fmt: skip
    for pipe, points in measured.matmul.items():
        table += [
            {"what": f"{pipe} matmul {(point.size / 2) ** (1 / 3):.0f}³", "rate": point.rate,
             "unit": "TFLOP/s", "of datasheet": f"{point.rate / gpu.peak_tflops(pipe):.0%}"}
            for point in points
        ]  # fmt: skip
    for point in measured.attention:
        words = ("causal " if point.is_causal else "") + ("bwd" if point.is_backward else "fwd")
        table.append({"what": f"attention {point.head_dim} {words}, {point.seq_len}",
                      "rate": point.tflops, "unit": "TFLOP/s"})  # fmt: skip
    table.append({"what": "tiny kernel", "rate": measured.kernel_floor_us, "unit": "us"})
    table += [{"what": f"host cost of {name}", "rate": us, "unit": "us"}
              for name, us in measured.host_us.items()]  # fmt: skip
    return table

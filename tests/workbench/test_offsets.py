"""The static scan names each narrow product by its line, and leaves sound offsets alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import triton
import triton.language as tl

from nearlight.core.builds import compile_build
from nearlight.core.cuda import Kernel
from nearlight.core.op import KernelBuild
from nearlight.core.triton import jit
from nearlight.ops import OPS
from nearlight.workbench.load import load_op
from nearlight.workbench.offsets import narrow_products

CUDA = Path(__file__).parent / "kernels" / "offsets.cu"
FAULTY = (
    "row_times_stride", "unsigned_row", "counter_times_size", "loaded_row", "counter_of_many",
)  # fmt: skip
SOUND = ("wide", "grid_stride", "column_of", "chunk_of_rows", "shared_rows", "signed_counter")


def fault_lines(source: str, first: int = 1) -> list[int]:
    return [
        n for n, line in enumerate(source.splitlines(), first) if re.search("[#/] fault$", line)
    ]


def named_lines(found: list[str], file: str) -> list[int]:
    return sorted(int(number) for line in found for number in re.findall(rf"{file}:(\d+)", line))


@pytest.mark.parametrize("name", FAULTY + SOUND)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_cuda_kernels(name: str, arch: str):
    build = KernelBuild(Kernel(CUDA, name), {}, {}, num_threads=128, shared_bytes=4096)
    found = narrow_products(compile_build(build, arch))
    source = CUDA.read_text()
    start = source.index(f"void {name}(")
    whole = source[start:].partition("\n}")[0]
    assert named_lines(found, "offsets.cu") == fault_lines(whole, source[:start].count("\n") + 1)
    assert bool(found) == (name in FAULTY) and all("32-bit" in line for line in found)


@jit
def _row_times_stride(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < M) & (columns < N)
    x = tl.load(x_ptr + rows * stride + columns, inside, 0.0)  # fault
    tl.store(y_ptr + rows.to(tl.int64) * N + columns, x, inside)


@jit
def _at(x_ptr, row, stride):
    return x_ptr + row * stride  # fault


@jit
def _in_a_helper(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at = _at(x_ptr, tl.program_id(0), stride)
    tl.store(y_ptr + columns, tl.load(at + columns))


@jit
def _carried_by_a_loop(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    offset = 0
    if N > 3:
        offset = tl.program_id(0) * stride  # fault
    total = 0.0
    for _ in range(M):
        total += tl.load(x_ptr + offset)
        offset += 1
    tl.store(y_ptr, total)


@jit
def _in_a_while_loop(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offset = row * stride  # fault
    total = 0.0
    while row < M:
        total += tl.load(x_ptr + offset)
        row += N
        offset += 1
    tl.store(y_ptr, total)


@jit
def _loaded_row(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    row = tl.load(y_ptr).to(tl.int32)
    tl.store(y_ptr, tl.load(x_ptr + row * stride))  # fault


@jit
def _two_sizes(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    half = M * N  # fault
    tl.store(y_ptr, tl.load(x_ptr + half))


@jit
def _cast_row(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None].to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + rows * stride + columns, (rows < M) & (columns < N), 0.0)
    tl.store(y_ptr + rows * N + columns, x, (rows < M) & (columns < N))


@jit
def _grouped_tiles(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(N, BLOCK)
    tile_m = pid // num_tiles
    tile_n = pid - tile_m * num_tiles
    columns = tile_n * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tile_m.to(tl.int64) * stride + columns, columns < N)
    tl.store(y_ptr + tile_m * num_tiles + tile_n, tl.sum(x, 0))


@jit
def _chunk_of_rows(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    first = tl.program_id(0) * N
    for row in range(first, tl.minimum(first + N, M)):
        tl.store(y_ptr + row, tl.load(x_ptr + row.to(tl.int64) * stride))


@jit
def _tiles_of_one_row(x_ptr, y_ptr, M, N, stride, BLOCK: tl.constexpr):
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + columns, tl.load(x_ptr + columns, columns < N), columns < N)


@pytest.mark.parametrize(
    "kernel",
    [
        _row_times_stride, _in_a_helper, _carried_by_a_loop, _in_a_while_loop, _loaded_row,
        _two_sizes,
        _cast_row, _grouped_tiles, _chunk_of_rows, _tiles_of_one_row,
    ],
    ids=lambda kernel: kernel.__name__,
)  # fmt: skip
def test_triton_kernels(kernel: triton.JITFunction):
    signature = dict.fromkeys(("x_ptr", "y_ptr"), "*fp32")
    signature |= dict.fromkeys(("M", "N", "stride"), "i32:16")
    found = narrow_products(compile_build(KernelBuild(kernel, signature, {"BLOCK": 32}), "sm_90"))
    parts = [kernel.fn, *([_at.fn] if kernel is _in_a_helper else [])]
    expected = [
        line
        for part in parts
        for line in fault_lines(inspect.getsource(part), inspect.getsourcelines(part)[1])
    ]
    assert named_lines(found, Path(__file__).name) == expected
    assert all("32-bit" in line for line in found)


def test_a_stride_of_64_bits_is_sound():
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "M": "i32", "N": "i32", "stride": "i64"}
    build = KernelBuild(_row_times_stride, signature, {"BLOCK": 32})
    assert narrow_products(compile_build(build, "sm_90")) == []


@jit
def _any_number(x_ptr, y_ptr, num_elements, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64) if IS_WIDE else tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, inside), inside)


@jit
def _tile_of_columns(x_ptr, y_ptr, N, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    x = tl.load(x_ptr + row * N + columns, columns < N)
    tl.store(y_ptr + row * N + columns, x, columns < N)


@pytest.mark.parametrize(
    ("kernel", "is_wide", "size", "is_sound"),
    [
        (_any_number, False, "i64", False),
        (_any_number, False, "i32", True),
        (_any_number, True, "i64", True),
        (_tile_of_columns, False, "i64", True),
    ],
)
def test_an_index_is_held_to_a_count_of_64_bits(kernel, is_wide, size, is_sound):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", kernel.arg_names[2]: size}
    build = KernelBuild(kernel, signature, {"IS_WIDE": is_wide, "BLOCK": 64})
    found = narrow_products(compile_build(build, "sm_90"))
    first = inspect.getsourcelines(kernel.fn)[1]
    assert named_lines(found, Path(__file__).name) == ([] if is_sound else [first + 3])
    assert all("product of an index and a constant" in line for line in found)


@pytest.mark.parametrize("name", OPS)
def test_our_ops_are_sound(name: str):
    for build in load_op(name).builds("sm_90"):
        assert narrow_products(compile_build(build, "sm_90")) == []

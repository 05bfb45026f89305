"""Property 4 without a GPU: the scan, and views spread past 2³¹ elements."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

import pytest
import torch
import triton.language as tl

from nearlight.core import backend as backends
from nearlight.core.cost import Cost
from nearlight.core.cuda import Kernel
from nearlight.core.op import Case, KernelBuild, Op
from nearlight.core.triton import jit
from nearlight.workbench.check import check
from nearlight.workbench.properties import size
from nearlight.workbench.trial import Rejected, Trial

CUDA = Path(__file__).parents[1] / "kernels" / "offsets.cu"
BLOCK = 8


@jit
def _double_kernel(x_ptr, y_ptr, N, stride_m, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if IS_WIDE:
        row = row.to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_m + columns, columns < N)
    tl.store(y_ptr + row.to(tl.int64) * N + columns, 2 * x, columns < N)


def _double(x: torch.Tensor, is_wide: bool) -> torch.Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (x.shape[0],)
        _double_kernel[grid](x, y, x.shape[1], x.stride(0), IS_WIDE=is_wide, BLOCK=BLOCK)
    return y


def op(narrow: str = "", **fields) -> Op:
    """Return 2 · x, with 32-bit offsets in "forward" or "backward"."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return _double(x, narrow != "forward")

        @staticmethod
        def backward(ctx, g):
            return _double(g, narrow != "backward")

    def double(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return Double.apply(x) if backends.use_triton(backend, x) else 2 * x

    def make_inputs(case, device, generator):
        shape = tuple(case.shape.values())
        x = torch.randn(shape, generator=generator, device=device).to(case.dtype)
        return {"x": x.requires_grad_()}

    base = Op(
        name="double",
        function=double,
        reference=lambda x: 2 * x,
        make_inputs=make_inputs,
        cases=[],
        check_cases=[
            Case("2x5", {"rows": 2, "columns": 5}, torch.bfloat16),
            Case("4x5", {"rows": 4, "columns": 5}, torch.bfloat16),
        ],
        cost=lambda case: {"forward": Cost(), "forward_backward": Cost()},
        extra_bytes=lambda case: 0,
    )
    return dataclasses.replace(base, **fields)


def builds(is_wide: bool):
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32", "stride_m": "i32"}
    constants = {"IS_WIDE": is_wide, "BLOCK": BLOCK}
    return lambda arch: [KernelBuild(_double_kernel, signature, constants)]


def row_of(record: Op) -> dict:
    (row,) = check(record, only=["size"]).rows
    return row


def test_a_sound_op_passes_and_the_row_says_what_was_done():
    row = row_of(op(builds=builds(is_wide=True)))
    assert (row["status"], row["num_trials"]) == ("passed", 5)
    for words in ("1 kernel on sm_90", "x spread past 2³¹", "upstream spread past 2³¹"):
        assert words in row["reason"]


@pytest.mark.parametrize(("narrow", "name"), [("forward", "x"), ("backward", "upstream")])
def test_an_offset_of_32_bits_reads_wrong_rows(narrow: str, name: str):
    row = row_of(op(narrow))
    assert row["status"] == "failed"
    assert row["reason"].startswith(f"{name} dim 0 spread past 2³¹ elements, as a 32-bit offset")
    assert f"step='{name} dim 0 spread past 2³¹ elements'" in row["reproduce"]


def test_an_offset_of_32_bits_is_found_by_the_scan():
    row = row_of(op(builds=builds(is_wide=False)))
    assert row["status"] == "failed" and "32-bit product" in row["reason"]
    assert "test_size.py:" in row["reason"] and "step='scan'" in row["reproduce"]


@pytest.mark.parametrize(("kernel", "status"), [("row_times_stride", "failed"), ("wide", "passed")])
def test_cuda_kernels_are_scanned_and_not_run(kernel: str, status: str):
    build = KernelBuild(Kernel(CUDA, kernel), {}, {}, num_threads=128)
    row = row_of(op("forward", builds=lambda arch: [build]))
    assert (row["status"], row["num_trials"]) == (status, 1)


def test_a_refused_layout_is_not_spread():
    steps = [t.step for t in size.trials(op(refused_layouts={"x": ["strided"]}), False, "cpu")]
    assert sorted(steps) == [f"upstream dim {dim} spread past 2³¹ elements" for dim in (0, 1)]


def test_where_nothing_can_be_judged_it_says_why():
    flat = op(check_cases=[Case("2x2", {"rows": 2, "columns": 2}, torch.bfloat16)])
    row = row_of(flat)
    assert row["status"] == "not applicable"
    assert "no builds to scan" in row["reason"] and "a GPU" in row["reason"]


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 8), 0),
        ((5, 7), 1),
        ((4, 3, 2), 0),
        ((2, 3, 4), 1),
        ((2, 4, 3, 5), 3),
        ((6,), 0),
        ((40_001, 2), 0),
    ],
)
def test_a_spread_view_reaches_past_the_limit_and_wraps_into_its_own_memory(shape, dim):
    tensor = torch.randn(shape).bfloat16().requires_grad_()
    view = size._spread(tensor, dim)
    assert torch.equal(view, tensor) and view.requires_grad
    reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    assert 2**31 <= reach <= 2**34 and max(view.stride()) < 2**31
    assert reach + view.storage_offset() < view.untyped_storage().nbytes() // view.element_size()
    assert view.storage_offset() >= 2**31
    others = view.select(dim, 0)
    assert others.is_contiguous() and view.stride(dim) > others.numel()


def test_too_few_rows_are_no_input():
    with pytest.raises(Rejected, match="3 rows"):
        size._spread(torch.ones(2, 8), 0)


def test_without_room_for_addresses_the_scan_alone_is_made(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    row = row_of(op())
    assert row["status"] == "not applicable" and "no room" in row["reason"]
    assert row_of(op(builds=builds(is_wide=True)))["num_trials"] == 1


@jit
def _flat_kernel(x_ptr, y_ptr, N, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64) if IS_WIDE else tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, offsets < N), offsets < N)


@pytest.mark.parametrize("is_wide", [True, False])
def test_a_kernel_on_any_number_of_elements_is_scanned_as_for_many(is_wide):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "i32:16"}
    build = KernelBuild(_flat_kernel, signature, {"IS_WIDE": is_wide, "BLOCK": 64})
    reason = size._scan(op(builds=lambda arch: [build]))
    assert reason.startswith("" if is_wide else "_flat_kernel at test_size.py:")
    assert bool(reason) != is_wide


def test_without_gradients_a_large_case_runs_once(monkeypatch: pytest.MonkeyPatch):
    # An upstream gradient would take as much memory as the outputs of a case that fills the GPU.
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return 2 * x

    monkeypatch.setattr(size, "make_upstream", lambda *_: pytest.fail("nothing needs it"))
    doubles = op(function=double, make_inputs=lambda *_: {"x": torch.ones(20, 3)})
    trial = Trial(Case("20x3", {"rows": 20, "N": 3}))
    assert size._last_rows_differ(doubles, trial, "cpu") == ""
    assert calls == [(20, 3)]

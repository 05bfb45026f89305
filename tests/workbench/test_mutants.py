"""Mutants of our own kernels: how they are made, what was recorded, and ten caught again."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / "tools"
RESULT = ROOT / "nearlight" / "data" / "mutants.json"
# So many of the recorded ones must still be there; else the record is of other kernels.
LEAST_PRESENT = 0.8

KERNEL = """
@jit
def _k(x_ptr, dy_ptr, stride_xm, stride_xn, N, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # µ stands for two bytes
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_xm + cols * stride_xn, (cols < N) & (row >= 0), other=0.0)
    total = x - tl.sum(x)
    total += x
    tl.debug_barrier()
    tl.store(x_ptr + cols, total.to(ACC), mask=cols < N)


def launch(x):
    _k[(triton.cdiv(x.numel(), 8),)](x, ACC=tl.float32)
"""


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("mutants")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def every(tool):
    return tool.mutants_of_all(ROOT, tool.OPS)


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RESULT.read_text(encoding="utf-8"))


def written(tmp_path: Path, name: str, text: str) -> Path:
    folder = tmp_path / "nearlight" / "ops" / "some"
    folder.mkdir(parents=True)
    (folder / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_kernel_is_broken_one_edit_at_a_time(tool, tmp_path: Path):
    mutants = tool.mutants_of(written(tmp_path, "kernels.py", KERNEL), "some")
    edits = {(m.kind, m.after) for m in mutants}
    x = "x = tl.load(x_ptr + row * stride_xm + cols * stride_xn"
    assert edits >= {
        ("mask dropped", f"{x})"),
        ("other dropped", f"{x}, (cols < N) & (row >= 0))"),
        ("mask term dropped", f"{x}, (cols < N), other=0.0)"),
        ("comparison moved", f"{x}, (cols <= N) & (row >= 0), other=0.0)"),
        ("comparison moved", f"{x}, (cols < N) & (row > 0), other=0.0)"),
        (
            "strides swapped",
            "x = tl.load(x_ptr + row * stride_xn + cols * stride_xm, "
            "(cols < N) & (row >= 0), other=0.0)",
        ),
        ("int64 dropped", "row = tl.program_id(0) # µ stands for two bytes"),
        ("sign changed", "total = (x) + (tl.sum(x))"),
        ("term dropped", "total = (x)"),
        ("accumulator in bf16", "total = (total + (x)).to(tl.bfloat16).to(ACC)"),
        ("barrier dropped", "pass"),
        ("store dropped", "pass"),
        ("cdiv off by one", "_k[(((x.numel()) // (8)),)](x, ACC=tl.float32)"),
        (
            "accumulator in bf16",
            "_k[(triton.cdiv(x.numel(), 8),)](x, ACC=triton.language.bfloat16)",
        ),
    }
    for mutant in mutants:
        broken = mutant.apply(KERNEL)
        compile(broken, mutant.key, "exec")
        differing = [pair for pair in zip(KERNEL.split("\n"), broken.split("\n"), strict=True)
                     if pair[0] != pair[1]]  # fmt: skip
        assert [(" ".join(a.split()), " ".join(b.split())) for a, b in differing] == [
            (mutant.before, mutant.after)
        ]
        assert KERNEL.split("\n")[mutant.line - 1].strip() == differing[0][0].strip()


def test_cuda_is_broken_as_well(tool, tmp_path: Path):
    source = (
        "__global__ void some_kernel(float* x, int n) {\n"
        "  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x;  // a < b\n"
        "  if (i < n && x) x[i] = 0;\n"
        "  __syncthreads();\n"
        "}\n"
    )
    mutants = tool.mutants_of(written(tmp_path, "some.cu", source), "some")
    assert {m.function for m in mutants} == {"some_kernel"}
    assert [(m.kind, m.line, m.after) for m in mutants] == [
        ("barrier dropped", 4, ";"),
        ("int64 dropped", 2, "const int64_t i = (blockIdx.x) * blockDim.x; // a < b"),
        ("comparison moved", 3, "if (i <= n && x) x[i] = 0;"),
        ("mask term dropped", 3, "if (i < n) x[i] = 0;"),
    ]


def test_shared_kernels_are_broken_for_the_first_op_that_shares_them(tool, tmp_path: Path):
    root = written(tmp_path, "kernels.py", KERNEL)
    (tmp_path / "nearlight/ops/_shared.py").write_text(KERNEL.replace("_k", "_shared_k"))
    for op in ("some", "other"):
        (tmp_path / "nearlight/ops" / op).mkdir(exist_ok=True)
        (tmp_path / "nearlight/ops" / op / "loop.py").write_text(
            "from nearlight.ops._shared import launch\n"
        )
    files = {(m.op, m.file) for m in tool.mutants_of_all(root, ["some", "other"])}
    assert files == {
        ("some", "nearlight/ops/some/kernels.py"),
        ("some", "nearlight/ops/_shared.py"),
    }


def test_every_mutant_of_ours_is_another_program_that_compiles(tool, every):
    sources = {m.file: (ROOT / m.file).read_text(encoding="utf-8") for m in every}
    for mutant in every:
        broken = mutant.apply(sources[mutant.file])
        assert broken != sources[mutant.file]
        if mutant.file.endswith(".py"):
            compile(broken, mutant.key, "exec")
    assert len({m.key for m in every}) == len(every) > 500


def test_a_sample_is_even_and_the_same_every_time(tool, every):
    chosen = tool.sample(every, 100)
    assert chosen == tool.sample(list(reversed(every)), 100)
    per_op = [sum(m.op == op for m in chosen) for op in tool.OPS]
    assert sum(per_op) == 100 and min(per_op) >= 10
    assert {m.kind for m in chosen} == {m.kind for m in every}


def test_every_equivalent_mutant_is_one_and_has_its_reason(tool, every):
    keys = {mutant.key for mutant in every}
    for key, reason in tool.equivalents().items():
        assert key in keys, f"its line changed: {key}"
        assert len(reason) > 20, key


def test_the_record_says_that_enough_is_caught(tool, recorded):
    assert recorded["share_caught"] >= tool.LEAST_CAUGHT
    counted = [row for row in recorded["rows"] if not row["equivalent"]]
    caught = [row for row in counted if row["caught_by"]]
    assert recorded["run"] == len(recorded["rows"]) >= 100
    assert (recorded["caught"], recorded["survived"]) == (len(caught), len(counted) - len(caught))
    assert recorded["share_caught"] == pytest.approx(len(caught) / len(counted), abs=1e-4)
    assert {row["op"] for row in recorded["rows"]} == set(tool.OPS)


@pytest.mark.slow
def test_ten_recorded_mutants_drawn_by_date_are_caught_again(tool, every, recorded):
    present = {mutant.key: mutant for mutant in every}
    rows = [row for row in recorded["rows"] if row["caught_by"] and not row["equivalent"]]
    held = [row for row in rows if row["key"] in present]
    assert len(held) >= LEAST_PRESENT * len(rows), "the kernels changed: run `make mutants`"
    quick = [row for row in held if row["caught_by"].endswith(tool.QUICK)]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    quick.sort(key=lambda row: hashlib.sha256(f"{day} {row['key']}".encode()).digest())
    with tool.bench(ROOT, 2) as place, ThreadPoolExecutor(2) as pool:
        again = pool.map(
            lambda row: place.judge(present[row["key"]], {row["caught_by"]: 0.0}), quick[:10]
        )
        missed = [row["key"] for row in again if not row["caught_by"]]
    assert missed == []

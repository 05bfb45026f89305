"""One kernel on CPU and GPU paths, meta-arguments, and machine code without a GPU."""

import runpy
import threading
import types
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from nearlight.core import compile_cache, interpreter
from nearlight.core.builds import check_budget
from nearlight.core.machine_code import MAX_SHARED_BYTES
from nearlight.core.op import KernelBuild
from nearlight.core.triton import compile_for, jit


@jit
def _scale_kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, (x * scale).to(y_ptr.dtype.element_ty), mask=offsets < n)


@jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr):
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * M + rows[None, :])
    tl.store(c_ptr + rows[:, None] * M + rows[None, :], tl.dot(a, b))


SCALE = KernelBuild(
    _scale_kernel,
    {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i64:16", "scale": "fp32"},
    {"BLOCK": 1024},
)
MATMUL = KernelBuild(
    _matmul_kernel,
    {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"},
    {"M": 64, "K": 32},
    uses_tensor_cores=True,
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("NEARLIGHT_CACHE", str(folder))
    return folder / "triton"


# --- launches ---


def launch_on_cpu(n=50, **options):
    x = torch.randn(n, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(n, 16),)](x, y, n, 0.5, BLOCK=16, **options)
    assert torch.equal(y, x * 0.5)


def test_cpu_tensors_are_interpreted_and_launch_options_have_no_meaning_there():
    launch_on_cpu(num_warps=8, num_stages=2)


@pytest.fixture
def gpu_path(monkeypatch):
    """Stand in for CUDA: meta tensors, and a record of what reaches Triton's own launch."""
    calls = []
    state = {"device": -1}

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            calls.append(("guard", self.device.type))

        def __exit__(self, *exception):
            calls.append(("unguard", self.device.type))

    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: calls.append(("run", k)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["device"])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    return calls, state


def test_other_tensors_go_to_triton_and_are_guarded_only_on_another_device(gpu_path):
    calls, state = gpu_path
    x = torch.empty(4, device="meta")
    _scale_kernel[(1,)](x, x, 4, 0.5, BLOCK=16, num_warps=2)
    assert [name for name, _ in calls] == ["run"]
    assert calls[0][1] == {"BLOCK": 16, "num_warps": 2, "grid": (1,), "warmup": False}
    calls.clear()
    state["device"] = 1  # the tensor's is -1
    _scale_kernel[(1,)](x_ptr=x, y_ptr=x, n=4, scale=0.5, BLOCK=16)
    assert [name for name, _ in calls] == ["guard", "run", "unguard"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "nearest"), [("BLOK", "BLOCK"), ("num_wraps", "num_warps"), ("block", "BLOCK")]
)
def test_unknown_meta_arguments_raise_on_both_paths(gpu_path, device, name, nearest):
    x = torch.empty(4, device=device)
    for _ in range(2):  # a refused name must not be remembered as checked
        with pytest.raises(TypeError, match=f"`{name}`; did you mean `{nearest}`\\?"):
            _scale_kernel[(1,)](x, x, 4, 0.5, **{name: 16})
    assert gpu_path[0] == []


def test_missing_arguments_and_warmup_on_cpu_raise():
    x = torch.zeros(4)
    with pytest.raises(TypeError, match="missing a required argument: 'BLOCK'"):
        _scale_kernel[(1,)](x, x, 4, 0.5)
    with pytest.raises(ValueError, match="CPU tensors are interpreted"):
        _scale_kernel.run(x, x, 4, 0.5, grid=(1,), warmup=True, BLOCK=16)


# --- compiling ---


def test_the_same_kernel_compiles_before_and_after_interpreting(cache):
    before = compile_for(SCALE, "sm_80")
    launch_on_cpu()
    for entry in cache.iterdir():
        entry.unlink()
    after = compile_for(SCALE, "sm_80")
    assert before == after
    assert before.name == "_scale_kernel" and before.arch == "sm_80"
    assert 0 < before.registers < 64
    assert before.stack_bytes == before.spill_bytes == before.matrix_instructions == 0
    assert "LDG.E.128" in before.instructions  # 16 bytes: pointers count as aligned
    assert ".target sm_80" in before.ptx and before.cubin[:4] == b"\x7fELF"


def test_alignment_is_part_of_the_signature():
    unaligned = replace(SCALE, signature={**SCALE.signature, "x_ptr": "*bf16:1"})
    assert "LDG.E.128" not in compile_for(unaligned, "sm_80").instructions
    any_size = replace(SCALE, signature={**SCALE.signature, "n": "i64"})
    assert "LDG.E.128" not in compile_for(any_size, "sm_80").instructions


@pytest.mark.parametrize(
    ("arch", "opcode"),
    [("sm_80", "HMMA"), ("sm_89", "HMMA"), ("sm_90a", "HGMMA"), ("sm_100", "UTCHMMA")],
)
def test_matrix_products_use_the_tensor_cores_of_each_generation(arch, opcode):
    code = compile_for(MATMUL, arch)
    assert code.arch == arch
    assert code.count(opcode) == code.matrix_instructions > 0
    assert 0 < code.shared_bytes <= MAX_SHARED_BYTES[int(arch[3:].rstrip("a"))]
    assert check_budget(MATMUL, code) == []


def test_turing_takes_fp16_but_neither_bf16_nor_products():
    half = replace(SCALE, signature={**SCALE.signature, "x_ptr": "*fp16", "y_ptr": "*fp16"})
    assert compile_for(half, "sm_75").registers > 0
    with pytest.raises(ValueError, match="_scale_kernel uses bf16, which the hardware lacks"):
        compile_for(SCALE, "sm_75")
    small = replace(MATMUL, constants={"M": 16, "K": 16})
    for build in (small, replace(small, uses_tensor_cores=False)):
        with pytest.raises(ValueError, match="a matrix product, which Triton compiles to scalar"):
            compile_for(build, "sm_75")
        seen = compile_for(build, "sm_75", is_strict=False)
        assert seen.has_dot and seen.matrix_instructions == 0 < seen.count("FFMA", "FMUL")
        with pytest.raises(ValueError, match="a matrix product"):  # kept on disk by now
            compile_for(build, "sm_75")


@pytest.mark.parametrize("arch", ["sm_91", "90", "sm_90x", "hopper", "sm_70"])
def test_unknown_arch(arch):
    with pytest.raises(ValueError, match=rf"arch='{arch}': allowed are sm_75, sm_80, .*sm_120"):
        compile_for(SCALE, arch)


def test_signature_and_constants_must_be_the_kernels_arguments():
    with pytest.raises(TypeError, match="has no argument `BLOCKS`; did you mean `BLOCK`"):
        compile_for(replace(SCALE, constants={"BLOCKS": 64}), "sm_80")
    with pytest.raises(TypeError, match="argument `BLOCK` is missing in constants"):
        compile_for(replace(SCALE, constants={}), "sm_80")
    with pytest.raises(TypeError, match="argument `n` is missing in signature or constants"):
        signature = {name: kind for name, kind in SCALE.signature.items() if name != "n"}
        compile_for(replace(SCALE, signature=signature), "sm_80")


FILL = """
import triton.language as tl
from nearlight.core.triton import jit
@jit
def _fill_kernel(x_ptr, BLOCK: tl.constexpr = parts.SIZE):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)
"""


def test_kernels_of_one_text_are_told_apart_by_a_default_from_another_file(cache, tmp_path):
    (tmp_path / "fill.py").write_text(FILL)
    codes = []
    for size in (128, 1024, 128):
        found = runpy.run_path(
            str(tmp_path / "fill.py"), {"parts": types.SimpleNamespace(SIZE=size)}
        )
        codes.append(
            compile_for(KernelBuild(found["_fill_kernel"], {"x_ptr": "*fp32"}, {}), "sm_86")
        )
    small, large, again = codes
    assert small == again and small.count("STG") < large.count("STG")


def test_results_are_cached_by_kernel_arch_and_options(cache, monkeypatch):
    code = compile_for(SCALE, "sm_86")
    with monkeypatch.context() as patch:
        patch.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled again"))
        assert compile_for(SCALE, "sm_86") == code
    entries = set(cache.iterdir())
    compile_for(replace(SCALE, num_warps=8), "sm_86")
    (new,) = set(cache.iterdir()) - entries
    assert new.suffix == ".json"  # and nothing half-written beside it


@pytest.mark.parametrize("damage", ["cut", "{}", "null", b"\xff\xfe", ""])
def test_a_damaged_cache_entry_is_made_again(cache, monkeypatch, damage):
    code = compile_for(SCALE, "sm_80")
    for entry in cache.iterdir():
        text = entry.read_bytes()[:100] if damage == "cut" else damage
        entry.write_bytes(text.encode() if isinstance(text, str) else text)
    assert compile_for(SCALE, "sm_80") == code
    monkeypatch.setattr(triton, "compile", lambda *a, **k: pytest.fail("compiled again"))
    assert compile_for(SCALE, "sm_80") == code


def test_a_cache_that_cannot_be_written_does_not_stop_a_compilation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARLIGHT_CACHE", str(tmp_path / "file" / "cache"))
    compile_cache._warn.cache_clear()
    with pytest.warns(UserWarning, match="compiled kernels are not kept"):
        assert compile_for(SCALE, "sm_80").arch == "sm_80"


def test_compiling_waits_for_an_interpretation_in_another_thread():
    finished = []
    with interpreter.lock:
        thread = threading.Thread(target=lambda: finished.append(compile_for(SCALE, "sm_80")))
        thread.start()
        thread.join(0.2)
        assert not finished
    thread.join()
    assert finished[0].arch == "sm_80"

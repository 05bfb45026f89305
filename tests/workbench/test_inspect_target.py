from pathlib import Path

import pytest
import torch

import nearlight
from nearlight.core.errors import BadInput
from nearlight.workbench.inspect import inspect
from nearlight.workbench.inspect_options import Options
from nearlight.workbench.inspect_target import find
from nearlight.workbench.load import load_op

HERE = Path(__file__).parent
CU = HERE / "kernels" / "inspected.cu"
PY = HERE / "inspected.py"


def builds(name, **options):
    return find(name, Options(**options)).builds("sm_90a")


def test_ops_are_found_by_name_and_by_file():
    assert find("swiglu", Options()).op.name == "swiglu"
    target = find(str(HERE / "twins.py") + ":TIGHT", Options())
    assert target.op is not None and len(target.builds("sm_80")) == 1


RECORDED = """
import sys; sys.path.insert(0, {here!r})
from dataclasses import replace
from pathlib import Path
import twins, inspected
from nearlight.core.cuda import Kernel
from nearlight.core.op import KernelBuild
copy = inspected._copy_kernel
cu = Kernel(Path({cu!r}), "copy<float>")
def builds(arch):
    if arch == "sm_75":
        raise ValueError("needs sm_80")
    bf16 = {{"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32:16"}}
    fp32 = {{**bf16, "x_ptr": "*fp32"}}
    return [KernelBuild(copy, bf16, {{"BLOCK": 512}}, num_warps=2),
            KernelBuild(copy, fp32, {{"BLOCK": 256}}), KernelBuild(cu, {{}}, {{}}, num_threads=256)]
OP = replace(twins.OP, builds=builds)
AGAIN = replace(twins.OP, builds=builds)
REFUSES = twins.REFUSES_ARCH
"""


def test_a_kernel_is_built_as_the_records_of_its_file_say(tmp_path):
    file = tmp_path / "op.py"
    file.write_text(RECORDED.format(here=str(HERE), cu=str(CU)))
    first, second = builds(f"{file}:copy")
    assert (first.num_warps, first.constants, first.signature["n"]) == (2, {"BLOCK": 512}, "i32:16")
    assert second.signature["x_ptr"] == "*fp32" and first == builds(f"{file}:_copy_kernel")[0]
    first, second = builds(f"{file}:copy", types="n=i64", constants="BLOCK=64,num_warps=8")
    assert first.signature == {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i64"}
    assert first.constants == second.constants == {"BLOCK": 64} and second.num_warps == 8
    (build,) = builds(f"{file}:cu")
    assert build.num_threads == 256 and builds(f"{file}:copy<float>") == [build]
    with pytest.raises(BadInput, match="are for a Triton kernel"):
        builds(f"{file}:cu", constants="BLOCK=64")
    with pytest.raises(BadInput, match="no kernel or Op record called cpy; name one of .*copy"):
        find(f"{file}:cpy", Options()).builds("sm_90a")
    with pytest.raises(ValueError, match="needs sm_80"):
        find(f"{file}:copy", Options()).builds("sm_75")
    assert {build.name for build in builds("swiglu:_gated_fwd_kernel")} == {"_gated_fwd_kernel"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("swglu", {}, "nearest: swiglu"),
        ("nothing.cu", {}, "no file nothing.cu"),
        (f"{CU}:spills", {"block": 2048}, "1 to 1024 threads"),
        (f"{CU}:spills", {"types": "x=i32"}, "Triton"),
        ("swiglu", {"block": 32}, "--block and --shared are for a .cu file"),
        (f"{CU}:spills", {"shared": -1}, "not below 0"),
        (str(HERE / "twins.py"), {"constants": "BLOCK=1"}, "is an Op record"),
        (str(PY), {}, "no Op record called OP; name one of _copy_kernel, _product_kernel"),
        (f"{PY}:_cpy_kernel", {}, "name one of _copy_kernel"),
    ],
)
def test_bad_input_is_named(name, options, message):
    with pytest.raises(BadInput, match=message):
        builds(name, **options)


def test_a_kernel_of_ours_is_built_as_the_ops_that_launch_it_whatever_file_it_lies_in():
    ops = Path(nearlight.__file__).parent / "ops"
    found = builds(f"{ops / '_activations.py'}:_gated_fwd_kernel")
    assert [each.constants for each in found] and len(found) > len(builds("swiglu")[:1])
    (build, *_) = builds(f"{ops / 'rms_norm' / 'kernels.py'}:_rms_norm_fwd_kernel")
    assert build.signature == builds("rms_norm:_rms_norm_fwd_kernel")[0].signature


MINE = """
from nearlight.core.cost import Cost
from nearlight.core.register import register_op
import torch
import sys; sys.path.insert(0, {here!r})
from dataclasses import replace
import twins
half = register_op("nearlight_test_inspected::half(Tensor x) -> Tensor", lambda x: x * {factor},
                   fake=torch.empty_like, cost=lambda args, kwargs, out: Cost())
OP = replace(twins.OP, function=half)
"""


def test_ops_that_are_loaded_live_on_beside_files_with_ops_of_the_same_names(tmp_path):
    files = []
    for name, factor in (("a.py", 0.5), ("b.py", 0.25)):
        files.append(tmp_path / name)
        files[-1].write_text(MINE.format(here=str(HERE), factor=factor))
    op = load_op(str(files[0]))
    for target, other in ((0, None), (1, None), (0, 1), (1, 0)):
        inspect(str(files[target]), ["sm_90"], None if other is None else str(files[other]))
        assert op.function(torch.ones(1)).item() == 0.5


BY_NAME = """
from nearlight.core.cost import Cost
from nearlight.core.launch import described_launches, gpu_of_arch
from nearlight.core.register import register_op
import torch
import sys; sys.path.insert(0, {here!r})
from dataclasses import replace
import inspected, twins
from nearlight.core.triton import jit
copy_kernel = jit(inspected._copy_kernel.fn)
def forward(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    copy_kernel[(1,)](x, out, x.numel(), BLOCK={block})
    return out
register_op("nearlight_test_by_its_name::copy_fwd", forward,
            fake=torch.empty_like, cost=lambda args, kwargs, out: Cost())
def builds(arch):
    with described_launches(gpu_of_arch(arch)) as found:
        torch.ops.nearlight_test_by_its_name.copy_fwd(torch.empty(100, device="meta"))
    return found
OP = replace(twins.OP, builds=builds)
"""


def test_an_op_that_is_called_by_its_name_is_that_of_its_own_file(tmp_path):
    files = [str(tmp_path / name) for name in ("a.py", "b.py")]
    for file, block in zip(files, (128, 1024), strict=True):
        Path(file).write_text(BY_NAME.format(here=str(HERE), block=block))
    for target, other in (files, files[::-1]):
        one, two = inspect(target, ["sm_90"], other).rows
        assert one != {**two, "target": one["target"]}
        # Of one file alone, too, though the other was read before.
        (alone,) = inspect(other, ["sm_90"]).rows
        assert alone["instructions"] == two["instructions"] != one["instructions"]


def test_kernels_of_two_folders_are_each_made_of_its_own_neighbours(tmp_path):
    files = []
    for block in (128, 1024):
        folder = tmp_path / str(block)
        folder.mkdir()
        (folder / "block_of_it.py").write_text(f"BLOCK = {block}\n")
        files.append(folder / "op.py")
        files[-1].write_text(
            "import block_of_it\nimport triton\nimport triton.language as tl\n@triton.jit\n"
            "def f(x_ptr: '*fp32', BLOCK: tl.constexpr = block_of_it.BLOCK):\n"
            "    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)\n"
        )
    for target, other in (files, files[::-1]):
        one, two = inspect(f"{target}:f", ["sm_90"], f"{other}:f").rows
        is_larger = one["instructions"] > two["instructions"]
        assert is_larger == (target == files[1]) and one["instructions"] != two["instructions"]

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

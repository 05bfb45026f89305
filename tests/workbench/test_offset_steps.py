"""Steps of a kernel: what PTX and TTIR say, and nothing that is only declared."""

from __future__ import annotations

from types import SimpleNamespace

from nearlight.workbench.offset_steps import Step, read_steps

PTX = """
.file 1 "/home/me/scale.cu"
.visible .entry scale(
  .param .u64 scale_param_0
)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  .loc 1 7 3
  ld.param.u64 %rd1, [scale_param_0];
  mad.lo.s32 %r4, %r1, %r2, %r3;
  setp.ge.s64 %p1, %rd2, %rd1;
  shl.b64 %rd3, %rd2, 2;
  ld.global.f32 %f1, [%rd3];
  ret;
}
.visible .entry other(
{
  mul.lo.s32 %r9, %r9, %r9;
}
"""
TTIR = """
#loc1 = loc("/home/me/scale.py":7:3)
  tt.func public @scale(%x_ptr: !tt.ptr<f32>, %N: i64) {
    %0 = tt.get_program_id x : i32 loc(#loc1)
    %c64 = arith.constant 64 : i32 loc(#loc1)
    %1 = arith.muli %0, %c64 : i32 loc(#loc1)
    %2 = arith.extsi %1 : i32 to i64 loc(#loc1)
    %3 = arith.cmpi slt, %2, %N : i64 loc(#loc1)
    %4 = arith.cmpi slt, %1, %c64 : i32 loc(#loc1)
    %5 = tt.addptr %x_ptr, %1 : !tt.ptr<f32>, i32 loc(#loc1)
  }
"""


def steps(**code: str) -> list[Step]:
    return list(read_steps(SimpleNamespace(**{"ttir": "", "ptx": "", "name": "scale", **code})))


def test_ptx_is_read_without_its_declarations_and_other_kernels():
    found = [(step.kind, step.result) for step in steps(ptx=PTX)]
    assert found == [
        ("argument", "%rd1"),
        ("product", "%r4'"),
        ("sum", "%r4"),
        ("wide bound", "%p1"),
        ("scaled", "%rd3"),
        ("address", ""),
        ("index", "%f1"),
    ]
    assert [step.place for step in steps(ptx=PTX) if step.kind == "address"] == ["scale.cu:7"]


def test_ttir_is_read_with_the_width_of_its_comparisons():
    found = [(step.kind, step.result, step.place) for step in steps(ttir=TTIR)]
    assert found == [
        ("argument", "%1.N", ""),
        ("index", "%1.0", ""),
        ("product", "%1.1", "scale.py:7"),
        ("sum", "%1.2", ""),
        ("wide bound", "%1.3", ""),
        ("bound", "%1.4", ""),
        ("address", "%1.5", "scale.py:7"),
    ]

"""Our kernels in place of a model's own: one exact fix per op that `nearlight.nn.patch` knows."""

from __future__ import annotations

from functools import partial

from torch import nn

from nearlight.fixes.fix import Fix, NothingToDo, Undo
from nearlight.nn import patch
from nearlight.nn.table import OPS


def _apply(op: str, model: nn.Module) -> Undo:
    classes = [(module, type(module)) for module in model.modules()]
    patched = patch(model, only=[op])
    if not patched.rows:
        reasons = dict.fromkeys(skipped.reason for skipped in patched.skipped)
        raise NothingToDo("; ".join(reasons) or patched.reason)

    def undo() -> None:
        # Not `unpatch`, which would take out earlier fixes and the caller's own patches too.
        for module, found in classes:
            module.__class__ = found

    return undo


FIXES = tuple(Fix(f"patch:{op}", "exact", partial(_apply, op)) for op in OPS)

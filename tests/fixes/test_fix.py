import dataclasses

import pytest

from nearlight.fixes.fix import Fix
from nearlight.fixes.loop import FIXES
from nearlight.nn.table import OPS


def test_every_op_of_the_table_is_an_exact_fix_found_by_its_name():
    assert set(FIXES) == {f"patch:{op}" for op in OPS}
    assert all(name == fix.name and fix.kind == "exact" for name, fix in FIXES.items())


def test_a_fix_cannot_be_changed_after_it_was_proved():
    fix = Fix("a", "exact", lambda model: lambda: None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fix.kind = "approximate"

"""Every op has the properties of the quick check; the full one is run by `prove`."""

from __future__ import annotations

import pytest

from nearlight.ops import OPS
from nearlight.workbench.check import check


@pytest.mark.parametrize("name", sorted(OPS))
def test_quick_check(name: str):
    report = check(OPS[name], quick=True)
    assert report.proof is not None
    failed = [(row["reason"], row["reproduce"]) for row in report.rows if row["status"] == "failed"]
    assert report.proof.passed, failed
    assert "no nearlight kernel" not in report.setup

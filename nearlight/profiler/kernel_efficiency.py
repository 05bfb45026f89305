"""How far PyTorch's own kernels stay below the copy ceiling, from committed measurements.

Predicted time of a call = its bytes at the copy ceiling ÷ efficiency + a floor per launch. The
values are those of one GPU and carried over to the others like every other ceiling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from nearlight.core.ceilings import MEASURED_GPU, package_path
from nearlight.profiler.capture import Call

FILE = package_path(MEASURED_GPU).with_name("kernels-torch.json")
# Element-wise kernels over broadcast or transposed operands, which are not vectorised.
STRIDED = "strided"


def efficiency(call: Call) -> float:
    """Return the share of the copy ceiling that a call's kernel reaches; 1 where none is known."""
    return _measured().get(STRIDED if call.is_strided else call.name, 1.0)


@cache
def _measured() -> Mapping[str, float]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return {row["op"]: row["efficiency"] for row in rows}

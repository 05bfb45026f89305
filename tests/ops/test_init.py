import importlib
import subprocess
import sys

import pytest
import torch

from nearlight import ops
from nearlight.core.backend import force


def test_records_are_named_like_their_functions():
    assert ops.OPS
    for name, op in ops.OPS.items():
        assert op.name == name and op.function is getattr(ops, name)
        assert op.cases and op.check_cases


def test_functions_keep_their_names_after_their_submodules_are_imported():
    for name, op in ops.OPS.items():
        importlib.import_module(f"nearlight.ops.{name}")
        assert getattr(ops, name) is op.function
    code = "import nearlight.ops.rms_norm, nearlight.ops; print(callable(nearlight.ops.rms_norm))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_explain_says_which_backend_and_why():
    x = torch.ones(2, 8)
    assert ops.explain("rms_norm", x).backend == "reference"
    assert ops.explain(ops.swiglu, x, x, backend="triton").backend == "triton"
    with force("triton"):
        assert "forced" in ops.explain("rope", x).reason
    with pytest.raises(ValueError, match="no op 'softmx'"):
        ops.explain("softmx", x)
    with pytest.raises(ValueError, match="none was given"):
        ops.explain("rms_norm", 3)

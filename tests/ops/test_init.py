import importlib
import subprocess
import sys

from nearlight import ops


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

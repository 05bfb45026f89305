"""The wheel: installed alone beside what the command line needs, it answers fast and light."""

import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What `nearlight --version` imports; torch and triton stay away.
COMMAND_LINE = ["typer", "rich", "platformdirs"]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    run(*build)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_headers_pages_and_results(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "nearlight/core/include/nearlight/reduce.cuh",
        "nearlight/profiler/pages/page.html",
        "nearlight/workbench/templates/op.py.jinja",
        "nearlight/workbench/templates/op.cu.jinja",
        "nearlight/data/results/h200/calibrate.json",
    ):
        assert needed in names
    assert not any(name.startswith(("tests/", "tools/")) for name in names)


@pytest.mark.slow
def test_an_installed_wheel_prints_its_version_without_torch(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, *COMMAND_LINE)
    run(*pip, "--no-deps", str(wheel))
    code = (
        "import sys, time; start = time.perf_counter(); import nearlight;"
        "seconds = time.perf_counter() - start;"
        "print(seconds, 'torch' in sys.modules, 'triton' in sys.modules, nearlight.__file__)"
    )
    seconds, has_torch, has_triton, file = run(str(python), "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path)
    assert (has_torch, has_triton) == ("False", "False")
    assert float(seconds) < 0.3
    command = [str(tmp_path / "venv" / "bin" / "nearlight"), "--version"]
    times = []
    for _ in range(5):  # the first writes bytecode; other tests run beside this one
        start = time.perf_counter()
        assert run(*command, cwd=tmp_path).startswith("nearlight 0.")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3

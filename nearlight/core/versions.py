"""What a report's numbers depend on: versions, and on a GPU its driver, the day and the commit."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nearlight

PACKAGE = Path(nearlight.__file__).resolve().parent


def install_line(extra: str) -> str:
    """Return the command that installs one of nearlight's extras, from the clone if it is one."""
    clone = PACKAGE.parent
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    return f"pip install 'nearlight[{extra}]'"


def versions(on_gpu: bool = False) -> dict[str, str]:
    """Return the versions of nearlight, torch, triton and Python.

    Args:
        on_gpu: add what a measurement needs: device, driver, date, and the commit of the source
            tree ("" for an installed package, whose version says which source it is).
    """
    import torch
    import triton

    found = {
        "nearlight": nearlight.__version__,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if not on_gpu:
        return found
    return found | {
        "device": torch.cuda.get_device_name(),
        "driver": _driver(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def peer_versions() -> dict[str, str]:
    """Return the versions of installed peers."""
    try:
        return {"liger-kernel": version("liger-kernel")}
    except PackageNotFoundError:
        return {}


def commit(package: Path = PACKAGE) -> str:
    """Return the commit of nearlight's own source tree, or "" where the package lies elsewhere.

    Args:
        package: folder of the package; a git repository that merely holds an installed copy, as
            one with a virtual environment inside does, is not its source tree.
    """
    root = package.parent
    if shutil.which("git") is None or not _is_own_source(root):
        return ""
    # Inside a hook git's own variables name another repository.
    environment = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", "rev-parse", "--show-toplevel", "--short=12", "HEAD"],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    is_answer = done.returncode == 0 and len(lines) == 2 and Path(lines[0]).resolve() == root
    return lines[1] if is_answer else ""


def _is_own_source(root: Path) -> bool:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == "nearlight")


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    return driver.decode() if isinstance(driver, bytes) else str(driver)

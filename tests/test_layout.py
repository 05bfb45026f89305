"""The house stays as it is drawn: rooms, exports, budgets, and a light import."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nearlight"
SOURCES = sorted(PACKAGE.rglob("*.py"))
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nearlight"]["budget"]
OPS = sorted(
    path.stem
    for path in (PACKAGE / "ops").iterdir()
    if not path.name.startswith("_")
    and (path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists()))
)


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_past_its_budget():
    past = {str(p.relative_to(ROOT)): lines(p) for p in SOURCES if lines(p) > BUDGET["file_lines"]}
    assert not past


def test_no_function_is_past_its_budget():
    past = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                # A docstring is for the reader and does not count.
                doc = node.body[0] if ast.get_docstring(node) else None
                length = node.end_lineno - node.lineno + 1
                length -= doc.end_lineno - doc.lineno + 1 if doc else 0
                if length > BUDGET["function_lines"]:
                    past[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert not past


def test_the_package_keeps_its_total():
    assert sum(map(lines, SOURCES)) <= BUDGET["package_lines"]


def test_every_op_has_a_test_an_export_and_a_record():
    from nearlight import ops
    from nearlight.core.op import Op

    assert OPS
    for name in OPS:
        assert callable(getattr(ops, name)), f"ops.{name} is not the function"
        assert isinstance(ops.OPS[name], Op) and ops.OPS[name].name == name
        assert (ROOT / "tests" / "ops" / f"test_{name}.py").exists()
    assert sorted(ops.OPS) == OPS


def test_every_source_file_has_its_test():
    missing = []
    for path in SOURCES:
        inside = path.relative_to(PACKAGE)
        if path.name.startswith("__") or lines(path) < 25:
            continue
        # A file of a folder of small pieces may be tested with the whole folder.
        candidates = [ROOT / "tests" / inside.with_name(f"test_{inside.name.removeprefix('_')}")]
        candidates += [
            ROOT / "tests" / folder.parent / f"test_{folder.name}.py"
            for folder in inside.parents
            if folder.name
        ]
        if not any(candidate.exists() for candidate in candidates):
            missing.append(str(inside))
    assert not missing


def test_the_readmes_map_of_rooms_is_the_tree():
    block = re.search(r"```\nnearlight/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    drawn = {line.split()[0].rstrip("/") for line in block[1].splitlines() if line.strip()}
    rooms = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert drawn == rooms


def fresh(code):
    """Run code in a fresh process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_nearlight_loads_neither_torch_nor_triton_and_is_fast():
    out = fresh(
        "import time, sys; t = time.perf_counter(); import nearlight; nearlight.__version__;"
        "print(time.perf_counter() - t, 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    seconds, torch, triton = out.split()
    assert (torch, triton) == ("False", "False")
    assert float(seconds) < 0.3


@pytest.mark.slow
def test_every_public_name_is_callable_twice_also_after_every_submodule():
    out = fresh(
        "import importlib, pkgutil, nearlight\n"
        "names = nearlight.__all__\n"
        "first = {n: getattr(nearlight, n) for n in names}\n"
        "for m in pkgutil.walk_packages(nearlight.__path__, 'nearlight.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "for n in names:\n"
        "    assert getattr(nearlight, n) is first[n], n\n"
        "    assert n in ('ops', 'nn') or callable(first[n]), n\n"
        "for n, op in nearlight.ops.OPS.items():\n"
        "    assert getattr(nearlight.ops, n) is op.function, n\n"
        "print(len(names))"
    )
    assert int(out) >= 8


def test_an_unknown_public_name_is_an_attribute_error():
    import nearlight

    with pytest.raises(AttributeError, match="optimise"):
        nearlight.optimise  # noqa: B018 - the access is what is tested


def test_no_silenced_lint_without_a_reason():
    bare = re.compile(r"#\s*(noqa(: [A-Z0-9, ]+)?|type: ignore(\[[^\]]*\])?)\s*$")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("nearlight", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not found


def test_every_changelog_fragment_is_one_that_the_changelog_takes():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = {kind["directory"] for kind in settings["type"]}
    # "+" stands for news that has no number to refer to.
    shape = re.compile(rf"\+[a-z-]+\.({'|'.join(kinds)})\.md")
    names = [path.name for path in (ROOT / settings["directory"]).iterdir()]
    assert names and all(shape.fullmatch(name) for name in names)

"""A pytest plugin: proofs of ops in a user's own test-suite.

pytest -p nearlight.workbench.pytest --nearlight-op my_op.py      # a test for each property
pytest -p nearlight.workbench.pytest tests                        # the fixture `check_op`

Under pytest-xdist, `--dist loadfile` proves an op once, and not in each worker anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from nearlight.core.errors import BadInput, MissingPart
from nearlight.core.op import Op
from nearlight.core.report import Report
from nearlight.core.user_code import split_name
from nearlight.workbench.apart import check_apart
from nearlight.workbench.check import check
from nearlight.workbench.check_report import NOT_APPLICABLE, broken, told
from nearlight.workbench.load import load_op
from nearlight.workbench.properties import PROPERTIES
from nearlight.workbench.record import file_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("nearlight")
    group.addoption(
        "--nearlight-op", action="append", default=[], metavar="FILE.py[:NAME]",
        help="prove this op, a test for each property; again for more ops",
    )  # fmt: skip
    group.addoption("--nearlight-quick", action="store_true", help="the quick check's properties")
    group.addoption("--nearlight-device", default="cpu", help="cpu interprets, cuda compiles")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the tests of the ops that are named on the command line."""
    for source in session.config.getoption("--nearlight-op"):
        node = _collector(session, source)
        added = node.collect()
        items += added
        told = pytest.CollectReport(node.nodeid, "passed", None, [*added])
        session.config.hook.pytest_collectreport(report=told)  # so that they are counted


def _collector(session: pytest.Session, source: str) -> _OpNode:
    file = file_of(source)
    if file is None:
        try:
            load_op(source)  # one of ours: known before any of its tests is run
        except BadInput as error:
            raise pytest.UsageError(f"--nearlight-op {source!r}: {error}") from None
        return _OpNode.from_parent(session, name=source, nodeid=source, source=source)
    if not file.is_file():
        raise pytest.UsageError(f"--nearlight-op {source}: no file {file}")
    root = session.config.rootpath
    nodeid = file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
    return _OpNode.from_parent(session, name=file.name, nodeid=nodeid, path=file, source=source)


class _OpNode(pytest.Collector):
    """An op that is named on the command line."""

    def __init__(self, source: str, path: Path | None = None, **kwargs: Any) -> None:
        super().__init__(path=path, **kwargs)
        self.source = source

    def collect(self) -> list[pytest.Item]:
        """Return a test for each property."""
        is_quick = self.config.getoption("--nearlight-quick")
        file, attribute = split_name(self.source)
        name = attribute if file and attribute else "OP"
        return [
            _PropertyItem.from_parent(self, name=f"{name}[{prop.name}]", prop=prop.name)
            for prop in PROPERTIES
            if prop.in_quick or not is_quick
        ]

    @cached_property
    def found(self) -> Report | BadInput | MissingPart:
        """What a check of the chosen properties answers; made when the first is asked for."""
        items = (item for item in self.session.items if isinstance(item, _PropertyItem))
        chosen = [item.prop for item in items if item.parent is self]
        quick = self.config.getoption("--nearlight-quick")
        try:
            device = self.config.getoption("--nearlight-device")
            return check_apart(self.source, quick, device, chosen)
        except (BadInput, MissingPart) as error:
            return error


class _Broken(Exception):  # the failure of an item, told without a traceback
    """How a property is broken, and the line that shows it again."""


class _PropertyItem(pytest.Item):
    """One property of an op."""

    def __init__(self, prop: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop = prop

    def runtest(self) -> None:
        """Prove the op in a process of its own, where no item of it has done so."""
        assert isinstance(self.parent, _OpNode)
        if isinstance(found := self.parent.found, Exception):
            raise found
        row = next(row for row in found.rows if row["property"] == self.prop)
        if row["status"] == NOT_APPLICABLE:
            pytest.skip(row["reason"])
        if row["status"] == "failed":
            raise _Broken(told(row))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the reason and the line; a traceback of this file would say nothing."""
        if isinstance(excinfo.value, (_Broken, BadInput, MissingPart)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the item stands."""
        return self.path, None, self.name


@pytest.fixture
def check_op(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Prove an op inside a test: `check_op("my_op.py")`, `check_op(OP, quick=True)`.

    A file is looked for beside the test, then in the working folder, and proved in a process of
    its own; so is nearlight's op by its name. A record is proved in this process. The test fails
    with the reason and the line that shows it again; otherwise the report comes back.
    """

    def prove(op: str | Op, quick: bool = False, device: str = "cpu", **options: Any) -> Report:
        if isinstance(op, Op):
            report = check(op, quick, device, **options)
        else:
            beside = request.path.parent / op
            is_beside = (file := file_of(str(beside))) is not None and file.is_file()
            report = check_apart(str(beside) if is_beside else op, quick, device, **options)
        if lines := broken(report):
            pytest.fail("\n".join((report.answer, *lines)), pytrace=False)
        if report.proof and report.proof.is_partial:
            warnings.warn(f"{report.answer}: {report.proof.method}", stacklevel=2)
        return report

    return prove

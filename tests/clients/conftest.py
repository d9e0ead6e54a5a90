"""Tests against the real packages; those of missing ones are skipped. `make clients` has all, and writes a page."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- generated: make clients -->", "<!-- end -->"
PACKAGES = {"ignite": "pytorch-ignite", "Lightning": "lightning", "PEFT": "peft", "TRL": "trl"}
_passed: dict[tuple[str, ...], set[str]] = {}
_failed: list[str] = []


def pytest_configure(config):
    config.addinivalue_line("markers", "client(package, what, works, remark): a row of docs/clients.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    rows = [tuple(marker.args) for marker in item.iter_markers("client")]
    if rows and report.outcome != "passed":
        _failed.append(item.nodeid)
    elif report.when == "call":
        path = item.path.relative_to(PAGE.parents[1]).as_posix()
        for row in rows:
            _passed.setdefault(row, set()).add(f"[{path}](../{path}) (`{item.originalname}`)")
    return report


def pytest_sessionfinish(session):
    all_ran = not (_failed or session.testsfailed or session.config.getoption("keyword"))
    if os.environ.get("WRITE_CLIENTS") and all_ran:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def table():
    """The rows by package, with the versions that they were seen with."""
    lines = ["| Package | What | Works | Seen by |", "|---|---|---|---|"]
    for (package, what, works, remark), tests in sorted(_passed.items(), key=lambda row: (row[0][0].lower(), row[0])):
        name = f"{package} {version(PACKAGES.get(package, package)).split('+')[0]}"
        how = f"{works}: {remark}" if remark else works
        lines.append(f"| {name} | {what} | {how} | {', '.join(sorted(tests))} |")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return "\n".join([*lines, "", f"Seen with Python {python}, on the CPU."])

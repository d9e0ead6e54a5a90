"""What `offload doctor` found: levels, findings, the report, and how people and programs read it."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class Level(enum.StrEnum):
    """How much a finding matters, the least first."""

    OK = "ok"
    NOTE = "note"
    """The thing works as it is; it could be better, or is good to know."""
    WARNING = "warning"
    """NVMe offload works, but slower or less safely than it should."""
    ERROR = "error"
    """NVMe offload does not work like this."""

    @property
    def rank(self) -> int:
        """Rank of the level: 0 for ok, 3 for error."""
        return list(Level).index(self)


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_EXIT_STATUS = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 1, Level.ERROR: 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one question."""

    check: str
    """What was looked at, in two or three words."""
    level: Level
    found: str
    meaning: str = ""
    """What follows from the finding; empty where nothing does."""
    remedy: str = ""
    """What to type or write to remedy it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What was found, for programs: numbers in bytes, names as the kernel writes them."""


def ok(check: str, found: str, **values: Any) -> Finding:
    """A finding that all is as it should be."""
    return Finding(check=check, level=Level.OK, found=found, values=values)


def problem(level: Level, check: str, found: str, meaning: str, remedy: str = "", **values: Any) -> Finding:
    """A finding of something to know or to change; there is always a meaning."""
    return Finding(check=check, level=level, found=found, meaning=meaning, remedy=remedy, values=values)


@dataclass(frozen=True)
class Group:
    """Findings about one thing."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All groups of one examination."""

    groups: tuple[Group, ...]
    engine: str | None
    """Name of the engine that would do the I/O; None if nothing can."""

    @property
    def level(self) -> Level:
        """The most serious level found."""
        return max((finding.level for finding in self._findings()), key=lambda level: level.rank, default=Level.OK)

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 0 all fine, 1 warnings, 2 an error."""
        return _EXIT_STATUS[self.level]

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON."""
        head = {"exit_status": self.exit_status, "level": self.level, "engine": self.engine}
        return head | {"groups": [dataclasses.asdict(group) for group in self.groups]}

    def summary(self) -> str:
        """The last line: how many of what, and what that means for the user."""
        counts = Counter(finding.level for finding in self._findings())
        parts = [_count(counts[level], level) for level in reversed(Level) if level is not Level.OK and counts[level]]
        verdict = {
            Level.OK: "All is fine",
            Level.NOTE: "All is fine",
            Level.WARNING: "NVMe offload works, with reservations",
            Level.ERROR: "NVMe offload does not work like this",
        }[self.level]
        return f"{verdict}: {', '.join(parts)}." if parts else f"{verdict}."

    def _findings(self) -> Iterable[Finding]:
        return (finding for group in self.groups for finding in group.findings)


def _count(number: int, level: Level) -> str:
    return f"{number} {level}{'s' if number > 1 else ''}"


def print_report(report: Report, console: Console) -> None:
    """A table on a terminal; elsewhere lines that can be searched, one finding after the other, never wrapped."""
    width = max((len(finding.check) for group in report.groups for finding in group.findings), default=0)
    for group in report.groups:
        if console.is_terminal:
            console.print(Text(group.title, style="bold"))
            console.print(Padding(_table(group, width), (0, 0, 1, 1)))
        else:
            _print_lines(group, console)
    _print_line(console, Text(report.summary(), style=_STYLES[report.level]))


def _table(group: Group, check_width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=max(map(len, Level)), no_wrap=True)
    table.add_column(width=check_width, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in group.findings:
        text = Text(finding.found)
        if finding.meaning:
            text.append(f"\n{finding.meaning}", style="dim")
        if finding.remedy:
            text.append("\n→ ", style="dim").append(finding.remedy, style="cyan")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, text)
    return table


def _print_lines(group: Group, console: Console) -> None:
    width = max(map(len, Level))
    _print_line(console, Text(group.title))
    for finding in group.findings:
        _print_line(console, Text(f"  {finding.level:{width}}  {finding.check}: {finding.found}"))
        if finding.meaning:
            _print_line(console, Text(f"  {'':{width}}  means: {finding.meaning}"))
        if finding.remedy:
            _print_line(console, Text(f"  {'':{width}}  to do: {finding.remedy}"))
    _print_line(console, Text(""))


def _print_line(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)

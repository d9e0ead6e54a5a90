"""`offload doctor` has findings, with levels, in a report that people and programs read."""

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any, Self

from rich.console import Console
from rich.text import Text


class Level(enum.StrEnum):
    """A level says how much a finding matters, the least first."""

    OK = "ok"
    NOTE = "note"  # the thing works as it is; it could be better, or is good to know
    WARNING = "warning"  # NVMe offload works, but slower or less safely than it should
    ERROR = "error"  # NVMe offload does not work like this

    @property
    def rank(self) -> int:
        """Rank of the level: 0 for ok, 3 for error."""
        return list(Level).index(self)


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_VERDICTS = ("All is fine", "NVMe offload works, with reservations", "NVMe offload does not work like this")
"""The exit status is the place in here."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one question."""

    check: str  # the thing that was looked at, in two or three words
    found: str
    level: Level = Level.OK
    meaning: str = ""  # the consequence of the finding; empty where there is none
    remedy: str = ""  # the words to type or write as a remedy

    def at(self, level: Level, meaning: str, remedy: str = "") -> Self:
        """The same as something to know or to change; there is always a meaning."""
        return replace(self, level=level, meaning=meaning, remedy=remedy)

    note = partialmethod(at, Level.NOTE)
    warning = partialmethod(at, Level.WARNING)
    error = partialmethod(at, Level.ERROR)


def saw(check: str, found: str) -> Finding:
    """A finding that all is as it should be, unless one of its methods says otherwise."""
    return Finding(check=check, found=found)


@dataclass(frozen=True)
class Group:
    """Findings about one thing."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All groups of one examination."""

    groups: tuple[Group, ...]
    engine: str | None  # name of the engine that would do the I/O; None if nothing can

    @property
    def level(self) -> Level:
        """The most serious level found."""
        return max((finding.level for finding in self._findings()), key=lambda level: level.rank, default=Level.OK)

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 0 all fine, 1 warnings, 2 an error."""
        return max(0, self.level.rank - 1)

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON."""
        head = {"exit_status": self.exit_status, "level": self.level, "engine": self.engine}
        return head | {"groups": [dataclasses.asdict(group) for group in self.groups]}

    def summary(self) -> str:
        """The last line: how many of what, and what that means for the user."""
        counts = Counter(finding.level for finding in self._findings())
        said = [level for level in reversed(Level) if level is not Level.OK and counts[level]]
        parts = [f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}" for level in said]
        verdict = _VERDICTS[self.exit_status]
        return f"{verdict}: {', '.join(parts)}." if parts else f"{verdict}."

    def _findings(self) -> Iterable[Finding]:
        return (finding for group in self.groups for finding in group.findings)


def print_report(report: Report, console: Console) -> None:
    """Print lines that can be searched, one finding after the other, never wrapped."""
    width = max(map(len, Level))
    for group in report.groups:
        text = Text.assemble((group.title, "bold"))
        for finding in group.findings:
            text.append("\n  ").append(f"{finding.level:{width}}", style=_STYLES[finding.level])
            text.append(f"  {finding.check}: {finding.found}")
            for name, said in (("means", finding.meaning), ("to do", finding.remedy)):
                if said:
                    text.append(f"\n  {'':{width}}  {name}: {said}", style="dim" if name == "means" else "cyan")
        console.print(text.append("\n"), soft_wrap=True)
    console.print(Text(report.summary(), style=_STYLES[report.level]), soft_wrap=True)

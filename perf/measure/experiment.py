"""The runner of every experiment: outcomes one after the other, each said and saved as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from nvme_offload.offload.progress import say
from nvme_offload.perf.measure.command_line import failures_in_words, say_saved
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.knobs import check_save
from nvme_offload.perf.measure.results import page, save


class Outcome(Protocol):
    """What measuring one case has found."""

    def cells(self) -> list[str]:
        """Its row of the table; the first cell says which case it is."""

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types, for JSON."""


class Column(NamedTuple):
    """A column of a table, and the figure of each outcome that stands in it."""

    head: str
    name: str
    """The attribute of the outcome."""
    spec: str = ""
    """How it is written, see `format`."""


class Figures:
    """An outcome whose figures are the fields and properties of a dataclass."""

    COLUMNS: ClassVar[Sequence[Column]]
    BESIDES: ClassVar[Sequence[str]] = ()
    """Properties that the document has and the table has not."""

    @classmethod
    def head(cls) -> list[str]:
        """Return the heads of the columns."""
        return [column.head for column in cls.COLUMNS]

    def cells(self) -> list[str]:
        """Return the row of the table."""
        return [format(getattr(self, column.name), column.spec) for column in self.COLUMNS]

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome in plain types, for JSON."""
        shown = [column.name for column in self.COLUMNS] + list(self.BESIDES)
        return {**{name: getattr(self, name) for name in shown}, **asdict(self)}  # type: ignore[call-overload]


Found = TypeVar("Found", bound=Outcome)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table of outcomes, and where it is written."""

    name: str
    """The name of its files."""
    title: str
    head: Sequence[str]
    path: Path | None = None
    """The folder on the drive; None: no drive is measured."""
    save_to: Path | None = None
    """The folder for the results: JSON and Markdown."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What else the document says, by its name there."""

    def run(
        self, outcomes: Iterable[Found], notes: Callable[[list[Found]], Sequence[str]] = lambda known: ()
    ) -> list[Found]:
        """Measure, and show the table.

        What is known is saved after every outcome, under one name, so that a run that is cut short has saved that.

        Args:
            outcomes: measured one by one as they are asked for. A further one of a case takes the place of the last.
            notes: makes the sentences below the table.

        Raises:
            typer.Exit: measuring failed; the reason has been said.
        """
        known, files = dict[str, Found](), list[Path]()
        with failures_in_words():
            if self.save_to:
                check_save(self.save_to)
            facts = environment([self.path] if self.path else [])
            for outcome in outcomes:
                row = outcome.cells()
                known[row[0]] = outcome
                say("  ".join(row))
                if self.save_to:
                    files = self._save(self.save_to, facts, list(known.values()), notes(list(known.values())))
        table = Table(*self.head, box=None)
        for outcome in known.values():
            table.add_row(*outcome.cells())
        console = Console()
        console.print(table)
        for note in notes(list(known.values())):
            console.print(note, soft_wrap=True, highlight=False)
        say_saved(files)
        return list(known.values())

    def _save(self, folder: Path, facts: dict[str, Any], outcomes: list[Found], notes: Sequence[str]) -> list[Path]:
        document = {"environment": facts, **self.asked, "results": [outcome.to_dict() for outcome in outcomes]}
        text = page(self.title, facts, self.head, [outcome.cells() for outcome in outcomes], notes)
        return save(folder, self.name, json.loads(json.dumps(document)), text)

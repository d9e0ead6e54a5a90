"""The runner of every experiment: outcomes one after the other, each said and saved as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from nvme_offload.offload.progress import say
from nvme_offload.perf.measure.command_line import check_save, failures_in_words, say_saved
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.results import page, save


class CaseOutcome(Protocol):
    """Measuring one case has found this."""

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
    """The format that it is written in, see `format`."""


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


Found = TypeVar("Found", bound=CaseOutcome)


def run_experiment(
    name: str,
    title: str,
    head: Sequence[str],
    outcomes: Iterable[Found],
    notes: Callable[[list[Found]], Sequence[str]] = lambda known: (),
    *,
    path: Path | None = None,
    save_to: Path | None = None,
    asked: Mapping[str, Any] = {},
) -> list[Found]:
    """Measure, and show a table.

    What is known is saved after every outcome, as JSON and Markdown under one name, so that a run that is cut short has
    saved that. A process group that the measured trainings made is gone afterwards.

    Args:
        name: of the files.
        title: of the page.
        head: of the table.
        outcomes: measured one by one as they are asked for. A further one of a case takes the place of the last.
        notes: makes the sentences below the table.
        path: the folder on the drive; None: no drive is measured.
        save_to: the folder for the results.
        asked: what else the document says, by its name there.

    Raises:
        typer.Exit: measuring failed; the reason has been said.
    """
    known, files = dict[str, Found](), list[Path]()
    with failures_in_words():
        if save_to:
            check_save(save_to)
        facts = environment([path] if path else [])
        try:
            for outcome in outcomes:
                row = outcome.cells()
                known[row[0]] = outcome
                say("  ".join(row))
                if save_to:
                    found = list(known.values())
                    document = {"environment": facts, **asked, "results": [each.to_dict() for each in found]}
                    text = page(title, facts, head, [each.cells() for each in found], notes(found))
                    files = save(save_to, name, json.loads(json.dumps(document)), text)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    found, console = list(known.values()), Console()
    table = Table(*head, box=None)
    for outcome in found:
        table.add_row(*outcome.cells())
    console.print(table)
    for note in notes(found):
        console.print(note, soft_wrap=True, highlight=False)
    say_saved(files)
    return found

"""The runner of every experiment: outcomes one after the other, each said and saved as soon as it is known."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from rich.console import Console

from nvme_offload.offload.progress import say
from ..measure.command_line import check_save, failures_in_words, say_saved
from ..measure.machine import environment
from ..measure.results import page, save, shown_table


class CaseOutcome(Protocol):
    """Measuring one case has found this."""

    @property
    def shown(self) -> Mapping[str, str]:
        """Its row of the table, by the heads of the columns; the first cell says which case it is."""

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types, for JSON."""


@dataclass(frozen=True)
class Row:
    """An outcome that is figures: those that stand in the table, written below their heads, and all of them."""

    shown: Mapping[str, str]
    figures: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All figures, and the name of the case."""
        return {"name": next(iter(self.shown.values())), **self.figures}


Found = TypeVar("Found", bound=CaseOutcome)


def run_experiment(
    name: str,
    title: str,
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
        outcomes: measured one by one as they are asked for. A further one of a case takes the place of the last.
        notes: makes the sentences below the table.
        path: the folder on the drive; None: no drive is measured.
        save_to: the folder for the results.
        asked: what else the document says.
    """
    known, files = dict[str, Found](), list[Path]()
    with failures_in_words():
        if save_to:
            check_save(save_to)
        facts = environment([path] if path else [])
        try:
            for outcome in outcomes:
                row = list(outcome.shown.values())
                known[row[0]] = outcome
                say("  ".join(row))
                if save_to:
                    found = list(known.values())
                    document = {"environment": facts, **asked, "results": [each.to_dict() for each in found]}
                    text = page(title, facts, [each.shown for each in found], notes(found))
                    files = save(save_to, name, json.loads(json.dumps(document)), text)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    found, console = list(known.values()), Console()
    if found:
        console.print(shown_table([each.shown for each in found], console))
    for note in notes(found):
        console.print(note, soft_wrap=True, highlight=False)
    say_saved(files)
    return found

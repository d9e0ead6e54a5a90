"""Results as files: a page for people, and a document for programs beside it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from .machine import describe

RESULTS = Path(__file__).parent.parent / "results"

_FLAT_LIST = re.compile(r"\[\s+([^][{}]*?)\s+\]")


def page(title: str, facts: dict[str, Any], rows: Sequence[Mapping[str, str]], notes: Sequence[str] = ()) -> str:
    """A Markdown page: a table of rows, by the heads of the columns, with the environment under it."""
    lines = [f"# {title}", "", *table(rows), "", *(f"- {note}" for note in (*notes, *describe(facts)))]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a Markdown table of rows, by the heads of the columns."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (rows[0], *(row.values() for row in rows))]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def shown_table(rows: Sequence[Mapping[str, str]], console: Console) -> Table:
    """Make a table that the console is wide enough for: with its columns as rows, or with cells of several lines."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    wide = console.options.update(max_width=1000)
    tables = _filled(cells), _filled(list(zip(*cells, strict=True)))
    return next((each for each in tables if console.measure(each, options=wide).maximum <= console.width), tables[0])


def figures(*heads: str, **style: Any) -> Table:
    """Make a table whose columns are figures, but for the first."""
    table = Table(*heads, **style)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _filled(cells: Sequence[Sequence[str]]) -> Table:
    filled = Table(*(Column(each, overflow="fold") for each in cells[0]), box=None)
    for row in cells[1:]:
        filled.add_row(*row)
    return filled


def save(folder: Path, name: str, document: dict[str, Any], text: str) -> list[Path]:
    """Write a document as JSON, and its page, under a name that says when it was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = document["environment"]["time"].replace(":", "").replace("+0000", "Z")
    paths = [folder / f"{stamp}-{name}.{suffix}" for suffix in ("json", "md")]
    # A list of numbers or words takes one line.
    said = json.dumps(document, indent=1)
    said = _FLAT_LIST.sub(lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", said)
    paths[0].write_text(said + "\n", encoding="utf-8")
    paths[1].write_text(text, encoding="utf-8")
    return paths

"""Results as files: a page for people, and a document for programs beside it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvme_offload.perf.measure.machine import describe

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


def save(folder: Path, name: str, document: dict[str, Any], text: str) -> list[Path]:
    """Write a document as JSON, and its page, under a name that says when it was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = document["environment"]["time"].replace(":", "").replace("+0000", "Z")
    paths = [folder / f"{stamp}-{name}.{suffix}" for suffix in ("json", "md")]
    # A list of numbers or words takes one line.
    said = _FLAT_LIST.sub(lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", json.dumps(document, indent=1))
    paths[0].write_text(said + "\n", encoding="utf-8")
    paths[1].write_text(text, encoding="utf-8")
    return paths

"""A page of HTML that stands alone: no script, no font and no picture from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; background: #fff; max-width: 900px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .9em .2em 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #8b949e; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; margin: .6em 0 1.2em; } svg text { font-size: 11px; fill: #57606a; }
svg text.title { font-size: 13px; font-weight: 600; fill: #22272e; } svg .grid { stroke: #e6e9ed; }
ul { padding-left: 1.2em; } footer { color: #57606a; font-size: .85em; margin-top: 3em; }
"""


def page(title: str, sections: Sequence[str], footer: Sequence[str], data: Any) -> str:
    """A document.

    Args:
        title: its heading.
        sections: HTML, one after the other.
        footer: lines about where and when it was measured.
        data: what the pictures were drawn from, kept in the page for programs: the element with the id ``data``.
    """
    kept = json.dumps(data, default=str).replace("<", "\\u003c")
    lines = "".join(f"<div>{escape(line)}</div>" for line in footer)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(sections)}<footer>{lines}</footer>"
        f'<script type="application/json" id="data">{kept}</script></body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """A heading with HTML below it."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column names things, the others are figures."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + f"<td>{escape(row[0])}</td>"
        + "".join(f'<td class="number">{escape(c)}</td>' for c in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def sentences(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"

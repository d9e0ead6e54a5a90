"""A page of HTML that stands alone, with pictures as SVG: no script, no font and no picture from elsewhere."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 36
COLORS = ("#3182bd", "#31a354", "#e6550d", "#756bb1", "#dd77aa", "#8b949e")
MOST_POINTS = 800  # the most points of one line: a picture of this width shows no more


def page(title: str, sections: Sequence[str], footer: Sequence[str], data: Any) -> str:
    """A document. `data`, which its pictures were drawn from, is kept in it: the element with the id ``data``."""
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


@dataclass(frozen=True)
class Line:
    """Values over time. NaN is a gap."""

    name: str
    values: Sequence[float]


def line_chart(
    title: str, seconds: Sequence[float], lines: Sequence[Line], unit: str, *, marks: Mapping[float, str] | None = None
) -> str:
    """Lines over seconds, which rise, from zero up. `marks`: words at a moment, each with a vertical line."""
    finite = [value for line in lines for value in line.values if math.isfinite(value)]
    top = nice_limit(max(finite, default=0.0))
    first, last = (seconds[0], seconds[-1]) if seconds else (0.0, 0.0)
    span = (last - first) or 1.0

    def x(when: float) -> float:
        return LEFT + (when - first) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(top, first, last)]
    for line, color in zip(lines, COLORS, strict=False):
        points = _thinned([(x(when), y(value)) for when, value in zip(seconds, line.values, strict=True)])
        path = _path(points)
        parts.append(f'<path class="line" d="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    for when, words in (marks or {}).items():
        parts.append(
            f'<line x1="{x(when):.1f}" x2="{x(when):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#d62728" '
            f'stroke-dasharray="4 3"/><text x="{x(when) + 4:.1f}" y="{TOP + 12}" fill="#d62728">{escape(words)}</text>'
        )
    names = [line.name for line in lines]
    return _svg(title, HEIGHT, [*parts, _legend(names)], unit)


def bar_chart(title: str, bars: Mapping[str, float], unit: str) -> str:
    """One horizontal bar for each name, from zero, with its value beside it."""
    top = max(bars.values(), default=0.0) or 1.0
    row, name_width = 26, 220
    room = WIDTH - name_width - 130
    parts = []
    for number, (name, value) in enumerate(bars.items()):
        at, width = TOP + number * row, max(0.0, value / top * room)
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<text x="{name_width - 8}" y="{at + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="{name_width}" y="{at + 3}" width="{width:.1f}" height="{row - 8}" fill="{color}"/>'
            f'<text x="{name_width + width + 6:.1f}" y="{at + 15}">{value:.3g} {escape(unit)}</text>'
        )
    return _svg(title, TOP + row * len(bars) + 10, parts)


def nice_limit(largest: float) -> float:
    """The end of an axis that holds `largest`: 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= largest * (1 - 1e-9))


def _svg(title: str, height: int, parts: Sequence[str], unit: str = "") -> str:
    shown = f"{title}, {unit}" if unit else title
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="0" y="14">{escape(shown)}</text>{"".join(parts)}</svg>'
    )


def _axes(top: float, first: float, last: float) -> str:
    parts = []
    for step in range(5):
        value, at = top * step / 4, HEIGHT - BOTTOM - step / 4 * (HEIGHT - TOP - BOTTOM)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for step in range(6):
        at = LEFT + step / 5 * (WIDTH - LEFT - RIGHT)
        when = first + (last - first) * step / 5
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{when:.3g}</text>')
    return "".join(parts) + f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">seconds</text>'


def _legend(names: Sequence[str]) -> str:
    parts, at = [], LEFT
    for name, color in zip(names, COLORS, strict=False):
        parts.append(f'<rect x="{at}" y="{HEIGHT - 13}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{at + 14}" y="{HEIGHT - 4}">{escape(name)}</text>')
        at += 34 + 7 * len(name)
    return "".join(parts)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each stretch, of many: no peak is lost."""
    stretch = -(-len(points) // (MOST_POINTS // 2))
    if stretch <= 2:
        return points
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        some = [point for point in points[start : start + stretch] if math.isfinite(point[1])]
        kept += sorted({min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}) if some else []
    return kept


def _path(points: Sequence[tuple[float, float]]) -> str:
    """SVG's path: a new stroke after each gap. A stroke of one point is drawn as a short one."""
    commands, drawing = [], False
    for x, y in points:
        if not math.isfinite(y):
            drawing = False
            continue
        commands.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        if not drawing:
            commands.append("h0.1")
        drawing = True
    return "".join(commands)

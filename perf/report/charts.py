"""Charts as inline SVG. Words stand beside them as HTML, so that letters keep their size on a phone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 1000, 200  # of a chart, in units of its own: it is stretched to the width of the page
LANE = 24  # the height of a lane of a timeline


class Series(NamedTuple):
    """A line of a chart, or a layer of a stack."""

    name: str
    kind: str  # the CSS class that has its colour
    values: Sequence[float]


def legend(named: Mapping[str, str]) -> str:
    """Return the meaning of each colour: words by CSS class."""
    keys = (f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in named.items())
    return f'<ul class="legend">{"".join(keys)}</ul>'


def lines(times: Sequence[float], series: Sequence[Series], most: str, span: str) -> str:
    """Return lines over time; `most` and `span` say in words what the top and the width of the chart are."""
    top = max((value for each in series for value in each.values), default=0.0) or 1.0
    places = _across(times)
    drawn = (
        f'<polyline class="{each.kind}" points="'
        + " ".join(f"{x:.1f},{HEIGHT * (1 - value / top):.1f}" for x, value in zip(places, each.values, strict=True))
        + '"/>'
        for each in series
    )
    return _figure("".join(drawn), {each.kind: each.name for each in series}, most, span)


def stacks(times: Sequence[float], series: Sequence[Series], most: str, span: str) -> str:
    """Return a stack of areas over time: layer upon layer, the first at the bottom."""
    totals = [sum(values) for values in zip(*(each.values for each in series), strict=True)]
    top, places, below, drawn = max(totals, default=0.0) or 1.0, _across(times), [0.0] * len(times), list[str]()
    for each in series:
        above = [low + value for low, value in zip(below, each.values, strict=True)]
        edge = [*zip(places, above, strict=True), *reversed([*zip(places, below, strict=True)])]
        points = " ".join(f"{x:.1f},{HEIGHT * (1 - value / top):.1f}" for x, value in edge)
        drawn.append(f'<polygon class="{each.kind}" points="{points}"/>')
        below = above
    return _figure("".join(drawn), {each.kind: each.name for each in series}, most, span)


def timeline(lanes: Mapping[str, Sequence[tuple[str, float, float]]], named: Mapping[str, str], span: str) -> str:
    """Return lanes of bars, each a CSS class, a beginning and an end; `named`: the meaning of the classes."""
    bars = [bar for lane in lanes.values() for bar in lane]
    start, end = min(bar[1] for bar in bars), max(bar[2] for bar in bars)
    scale = WIDTH / ((end - start) or 1.0)
    rows = []
    for name, lane in lanes.items():
        drawn = "".join(
            f'<rect class="{kind}" x="{(first - start) * scale:.2f}" width="{max(0.3, (last - first) * scale):.2f}" '
            f'height="{LANE}"/>'
            for kind, first, last in lane
        )
        rows.append(f"<p>{escape(name)}</p>{_svg(drawn, LANE)}")
    return f'<figure class="lanes">{legend(named)}{"".join(rows)}<figcaption>{escape(span)}</figcaption></figure>'


def bars(rows: Mapping[str, tuple[str, float, str]]) -> str:
    """Return horizontal bars: for each name a CSS class, a value, and the value in words."""
    most = max((value for _, value, _ in rows.values()), default=0.0) or 1.0
    lines_of = (
        f'<tr><th>{escape(name)}</th><td><i class="{kind}" style="width:{100 * value / most:.1f}%"></i></td>'
        f"<td>{escape(words)}</td></tr>"
        for name, (kind, value, words) in rows.items()
    )
    return f'<table class="bars">{"".join(lines_of)}</table>'


def _across(times: Sequence[float]) -> list[float]:
    first, last = times[0], times[-1]
    return [WIDTH * (at - first) / ((last - first) or 1.0) for at in times]


def _svg(drawn: str, height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" style="height:{height}px">{drawn}</svg>'


def _figure(drawn: str, named: Mapping[str, str], most: str, span: str) -> str:
    words = f"<figcaption>{escape(span)}</figcaption>"
    return f"<figure>{legend(named)}<p>{escape(most)}</p>{_svg(drawn, HEIGHT)}{words}</figure>"

"""Draw the pictures of the pages: one SVG serves light and dark, and its colours follow the page that shows it.

A picture is 400 units wide and has letters of 13, so that they can be read on a phone.
"""

import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, LETTER, LINE = 400, 13, 18
ON_A_DESKTOP = 1.5  # times as wide, where there is room
TONES = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#22272e", "#e6edf3"),
    "grid": ("#d0d7de", "#3d444d"),
    "forward": ("#a39d3c", "#d2cc6b"),
    "backward": ("#756bb1", "#a79fdd"),
    "norm": ("#d0609a", "#ee8fbe"),
    "wait": ("#c4cad1", "#57606a"),
    "read": ("#3182bd", "#63b0ea"),
    "compute": ("#e6550d", "#ff8f57"),
    "write": ("#2c9149", "#56c274"),
}
"""Each colour by its class, on a light page and on a dark one."""
SPANS = {
    "forward": "forward",
    "backward": "backward",
    "norm": "norm",
    "wait": "waits",
    "read": "reads",
    "compute": "updates",
    "write": "writes",
}
LANES = {
    "training": ("forward", "backward", "norm", "wait"),
    "reads": ("read",),
    "updates": ("compute",),
    "writes": ("write",),
}


class Picture:
    """A picture that grows downwards; `y` is where it ends."""

    def __init__(self, title: str = "") -> None:
        self.y = 6.0
        self._parts: list[str] = []
        if title:
            self.line(title, "ink bold")

    def text(self, x: float, y: float, words: str, *, kind: str = "ink", anchor: str = "start") -> None:
        """Put words on a base line that is at `y`."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def line(self, words: str, kind: str = "ink") -> None:
        """Add a line of words at the left."""
        self.y += LINE
        self.text(8, self.y - 5, words, kind=kind)

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Fill a rectangle; the shortest can still be seen."""
        size = f'width="{max(0.6, width):.2f}" height="{height:g}"'
        self._parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y:g}" {size}/>')

    def rule(self, x: float, top: float, bottom: float) -> None:
        """Draw a vertical dashed line."""
        self._parts.append(f'<path class="ink" d="M{x:.1f} {top:g}V{bottom:g}" stroke-dasharray="4 3"/>')

    def legend(self, kinds: Mapping[str, str]) -> None:
        """Say what colours mean, in as many lines as that takes."""
        x = 8.0
        self.y += 6
        for place, (kind, words) in enumerate(kinds.items()):
            wide = 20 + 7.6 * len(words) + 12
            if place and x + wide > WIDTH:
                x, self.y = 8.0, self.y + LINE
            self.bar(x, self.y + 3, 12, 12, kind)
            self.text(x + 17, self.y + 14, words)
            x += wide
        self.y += LINE

    def stack(self, parts: Iterable[tuple[str, float]], scale: float, *, x: float = 8.0, height: float = 16.0) -> float:
        """Put bars behind one another; return where they end. `scale`: units of the picture for each of a value."""
        for kind, value in parts:
            if value > 0:
                self.bar(x, self.y, value * scale, height, kind)
                x += value * scale
        return x

    def ticks(self, x: float, scale: float, top: float, values: Iterable[float], unit: str) -> None:
        """Draw lines at values from `top` down to here, and name them below."""
        self.y += LINE
        for value in values:
            self._parts.insert(0, f'<path class="grid" d="M{x + value * scale:.1f} {top:g}V{self.y - 14:g}"/>')
            self.text(x + value * scale, self.y - 2, f"{value:g}{unit}", anchor="middle")

    def save(self, path: Path, source: str) -> None:
        """Write the file; `source` stands in it: what made the picture."""
        height = round(self.y + 8)
        light, dark = ("".join(f".{kind}{{color:{tones[side]}}}" for kind, tones in TONES.items()) for side in (0, 1))
        style = (
            f"text{{font:{LETTER}px system-ui,sans-serif}}rect,text{{fill:currentColor}}.bold{{font-weight:bold}}"
            f"path{{fill:none;stroke:currentColor}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
        )
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH * ON_A_DESKTOP:g}" height="{height * ON_A_DESKTOP:g}">\n'
            f"<desc>{escape(source)}</desc><style>{style}</style>\n"
            + "\n".join([f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>', *self._parts])
            + "\n</svg>\n",
            encoding="utf-8",
        )
        sys.stdout.write(f"{path} is drawn\n")

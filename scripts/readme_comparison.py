"""The README's comparison, from a saved result: `python -m scripts.readme_comparison [RESULT.json]`.

Without a file it takes the newest of perf/results. The table goes between its marks in the README, the picture, which
its first screen shows, to docs/pictures/comparison.svg, with the name of the result in it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Self

from nvme_offload.perf.experiments.compare import Contender, Seen, notes
from nvme_offload.perf.experiments.gpt import parse_size
from nvme_offload.perf.experiments.peers.worker import Ended, Order
from nvme_offload.perf.measure.comparison import Quad
from nvme_offload.perf.measure.machine import describe
from nvme_offload.perf.measure.results import RESULTS, table
from scripts.picture import PICTURES, Picture

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURE = PICTURES / "comparison.svg"
BEGIN, END = "<!-- generated: python -m scripts.readme_comparison -->", "<!-- end -->"
WIDTH = 100


@dataclass(frozen=True)
class Result:
    """A comparison that has ended."""

    environment: dict[str, Any]
    """Facts of the machine, as `nvme_offload.perf.measure.machine` gives them."""
    order: Order
    """The order of all contenders, but for who and where."""
    found: list[Seen]
    """Ours first."""

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read a result that was saved.

        Raises:
            ValueError: the file is none of a comparison; names it.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            order = Order(**document["order"])
            numel = parse_size(order.size).num_parameters
            found = [_found(entry, numel) for entry in document["results"]]
            return cls(document["environment"], order, found)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no saved comparison ({error!r}); make one with --save") from None


def _found(saved: dict[str, Any], numel: int) -> Seen:
    ended = saved["ended"]
    known = {each.name for each in fields(Seen)} - {"contender", "numel", "quads", "ended"}
    return Seen(
        **{name: value for name, value in saved.items() if name in known},
        contender=Contender(**saved["contender"]),
        numel=numel,
        quads=[Quad(tuple(rates)) for rates in saved["quads"]],
        ended=Ended(**ended) if ended else None,
    )


def newest() -> Path:
    """The latest result of a comparison that is kept.

    Raises:
        FileNotFoundError: there is none; says how to make one.
    """
    if not (found := sorted(RESULTS.glob("*-compare.json"))):
        raise FileNotFoundError(f'{RESULTS} has no comparison: make compare ARGS="--save perf/results"')
    return found[-1]


def block(result: Result, name: str) -> str:
    """The lines between the marks; `name`: of the result in perf/results, without its ending."""
    what, columns, times, distance, *cannot = notes(result.order, result.found)
    where = "; ".join(describe(result.environment))
    said = [
        f"{what}.",
        f"On {where} ([all of it](perf/results/{name}.md)).",
        f"{columns}; {times}; {distance}.",
        *cannot,
    ]
    return "\n".join(
        [
            *table([found.shown for found in result.found]),
            "",
            *textwrap.wrap(" ".join(said), WIDTH, break_long_words=False, break_on_hyphens=False),
        ]
    )


def draw(all_found: list[Seen], path: Path, source: str) -> None:
    """Save bars of all who trained, seconds of an iteration and peak memory; `source` stands in the file."""
    trained = {
        found.contender: (median(found.seconds), found.ended.peak_bytes / 2**30) for found in all_found if found.ended
    }
    picture = Picture("An iteration: seconds, and GiB of memory at most")
    picture.legend({"compute": "seconds", "read": "peak memory, GiB"})
    scales = [(400 - 60) / max(values) for values in zip(*trained.values(), strict=True)]
    for contender, values in trained.items():
        picture.y += 4
        picture.line(contender.text, "ink bold" if contender.name == "ours" else "ink")
        for kind, value, scale in zip(("compute", "read"), values, scales, strict=True):
            end = picture.stack([(kind, value)], scale, height=12)
            picture.text(end + 6, picture.y + 11, f"{value:.2f}")
            picture.y += 14
    picture.save(path, source)


def main() -> None:
    """Write table and picture."""
    path = Path(sys.argv[1]) if sys.argv[1:] else newest()
    result = Result.of_file(path)
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{block(result, path.stem)}\n{END}{after}", encoding="utf-8")
    draw(result.found, PICTURE, path.stem)
    sys.stdout.write(f"{README.name} and {PICTURE.relative_to(ROOT)} have {path.stem}\n")


if __name__ == "__main__":
    main()

"""The README's comparison, from a saved result: `python -m scripts.readme_comparison [RESULT.json]`.

Without a file it takes the newest of perf/results. The table goes between its marks in the README, the picture to
docs/pictures/comparison.png, with the name of the result in its metadata.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from nvme_offload.perf.experiments.peers.result import HEAD, Result, draw, notes
from nvme_offload.perf.measure.machine import describe
from nvme_offload.perf.measure.results import RESULTS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "comparison.png"
BEGIN, END = "<!-- generated: python -m scripts.readme_comparison -->", "<!-- end -->"
WIDTH = 120


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
    what, columns, distance, *cannot = notes(result.order, result.found)
    where = "; ".join(describe(result.environment))
    said = [f"{what}.", f"On {where} ([all of it](perf/results/{name}.md)).", f"{columns}; {distance}.", *cannot]
    return "\n".join(
        [
            f"![Seconds of an iteration and peak memory of each]({PICTURE.relative_to(ROOT).as_posix()})",
            "",
            "| " + " | ".join(HEAD) + " |",
            "|" + "---|" * len(HEAD),
            *("| " + " | ".join(found.cells()) + " |" for found in result.found),
            "",
            *textwrap.wrap(" ".join(said), WIDTH, break_long_words=False, break_on_hyphens=False),
        ]
    )


def main() -> None:
    """Write table and picture."""
    path = Path(sys.argv[1]) if sys.argv[1:] else newest()
    result = Result.of_file(path)
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{block(result, path.stem)}\n{END}{after}", encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    draw(result.found, PICTURE, path.stem)
    sys.stdout.write(f"{README.name} and {PICTURE.relative_to(ROOT)} have {path.stem}\n")


if __name__ == "__main__":
    main()

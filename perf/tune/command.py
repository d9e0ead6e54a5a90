"""`offload tune`: the search for the `aio` section of a drive, on the pattern of an optimizer step.

The drive's speed changes by the minute, so a trial never stands alone: the reference setting (the defaults) is
measured before and after it, and its score is its bandwidth over theirs. The search goes from coarse to fine: a wide
grid of block size and depth on one ring, the neighbours of the best, then engines and rings, and last several rounds
of the finalists.

The choice, in words: among the finalists whose median score is within the noise of the best, the one with the fewest
bytes in flight; then fewer rings, then the engine that ``auto`` takes first, then the larger block. The noise is what
medians of so many trials scatter: the 95th percentile of how far a finalist's trials lie from their median, divided by
the square root of their number; at least 2 %.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from nvme_offload.aio_native import ENGINES, EngineUnavailable
from nvme_offload.offload.progress import progress, say
from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import KiB, MiB, format_bytes
from nvme_offload.perf.measure.command_line import (
    AIO,
    DEFAULT_SIZE,
    HERE,
    Direct,
    Json,
    KnobError,
    Paths,
    Settings,
    Size,
    check_folder,
    check_settings,
    check_space,
    failures_in_words,
    say_saved,
)
from nvme_offload.perf.measure.comparison import percentile
from nvme_offload.perf.measure.machine import describe, environment
from nvme_offload.perf.measure.workloads import RawTarget, Region

COARSE_BLOCKS = (256 * KiB, MiB, 4 * MiB)
COARSE_DEPTHS = (4, 16, 64)
MORE_RINGS = (2, 4)
LEAST_BLOCK, MOST_BLOCK = 64 * KiB, 16 * MiB
MOST_DEPTH = 256
NUM_FINALISTS = 4
LEAST_NOISE = 0.02
TRIALS_PLANNED = 45  # number of trials that a search makes, about; divides the time among them
SEARCH_SHARE = 0.6  # share of the time that is spent before the finals
CLOSE = 0.9  # least share of the best score with which a candidate is a finalist
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Search:
    """One call of the command is asked for this."""

    paths: tuple[Path, ...]
    size: int
    seconds: float
    direct: DirectPolicy
    output: Path
    engines: tuple[str, ...] = ENGINES

    @property
    def settings(self) -> Settings:
        """The reference: the defaults, on this region."""
        return Settings(paths=self.paths, size=self.size, direct=self.direct)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the search: an engine and the knobs that it is opened with."""

    engine: str
    block_size: int
    queue_depth: int
    rings: int = 1

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Simpler and smaller settings sort first: by what they ask of the drive and of memory, then by rings."""
        in_flight = self.block_size * self.queue_depth * self.rings
        return in_flight, self.rings, ENGINES.index(self.engine), -self.block_size

    def neighbours(self) -> list[Setting]:
        """Half and twice the block, half and twice the depth, and both against each other."""
        steps = ((0.5, 1), (2, 1), (1, 0.5), (1, 2), (2, 0.5), (0.5, 2))
        around = (
            Setting(engine=self.engine, block_size=int(self.block_size * b), queue_depth=int(self.queue_depth * d))
            for b, d in steps
        )
        return [s for s in around if LEAST_BLOCK <= s.block_size <= MOST_BLOCK and 1 <= s.queue_depth <= MOST_DEPTH]

    def __str__(self) -> str:
        rings = f", {self.rings} rings" if self.rings > 1 else ""
        return f"{self.engine}, {format_bytes(self.block_size)} x {self.queue_depth}{rings}"


class Scores:
    """Every score of every setting, in the order of the search."""

    def __init__(self) -> None:
        self.by_setting = defaultdict[Setting, list[float]](list)
        self.rates = defaultdict[Setting, list[float]](list)

    def add(self, setting: Setting, score: float, rate: float) -> None:
        """Note a trial."""
        self.by_setting[setting].append(score)
        self.rates[setting].append(rate)

    def median(self, setting: Setting) -> float:
        """The middle score of a setting."""
        return median(self.by_setting[setting])

    def noise(self, finalists: list[Setting]) -> float:
        """Return what repetitions scatter around their medians: 95 % of them lie within, in shares of the median."""
        off = [
            abs(s / self.median(f) - 1) for f in finalists for s in self.by_setting[f] if len(self.by_setting[f]) > 1
        ]
        mean_count = mean(len(self.by_setting[finalist]) for finalist in finalists)
        return max(LEAST_NOISE, percentile(off, 95) / math.sqrt(mean_count) if off else LEAST_NOISE)

    def finalists(self, reference: Setting) -> list[Setting]:
        """The best, the simplest of those close to it, and the reference."""
        best = max(self.by_setting, key=self.median)
        close = [s for s in self.by_setting if self.median(s) >= CLOSE * self.median(best)]
        simple = sorted(close, key=lambda setting: setting.cost)[: NUM_FINALISTS - 1]
        return list(dict.fromkeys([best, *simple, reference]))

    def choose(self, finalists: list[Setting]) -> Setting:
        """The simplest finalist within the noise of the best."""
        best = max(self.median(finalist) for finalist in finalists)
        noise = self.noise(finalists)
        good = [finalist for finalist in finalists if self.median(finalist) >= (1 - noise) * best]
        return min(good, key=lambda setting: setting.cost)


class Tuner:
    """Measures settings against the reference, on one region of the drive."""

    def __init__(self, search: Search, region: Region, engine: str) -> None:
        self.reference = Setting(engine=engine, block_size=AIO.block_size, queue_depth=AIO.queue_depth)
        self.scores = Scores()
        self._search = search
        self._region = region
        with RawTarget(self._settings(self.reference), region) as target:
            target.prepare()
            rate = target.run("mixed", search.size).bw_bytes
        seconds = search.seconds / (2 * TRIALS_PLANNED) * 0.5  # the rest is opening and closing
        self._trial_bytes = max(search.size // 8, int(rate * seconds))
        self._last_reference = self._measure(self.reference)

    def trial(self, setting: Setting) -> str:
        """Measure a setting and the reference after it; the one before it is known. Says what came out."""
        before = self._last_reference
        rate = self._measure(setting)
        after = self._last_reference = self._measure(self.reference)
        score = rate / math.sqrt(before * after)
        self.scores.add(setting, score, rate)
        return f"{setting}: {rate / 1e9:.2f} GB/s, {score:.2f} of the defaults"

    def _measure(self, setting: Setting) -> float:
        with RawTarget(self._settings(setting), self._region) as target:
            return target.run("mixed", self._trial_bytes).bw_bytes

    def _settings(self, setting: Setting) -> Settings:
        settings = replace(self._search.settings, ioengine=setting.engine, bs=setting.block_size)
        return replace(settings, iodepth=setting.queue_depth, numjobs=setting.rings)

    def candidates(self) -> Iterator[Setting]:
        """Give settings to try, from coarse to fine; each part looks at the scores of those before."""
        engine = self.reference.engine
        grid = [
            Setting(engine=engine, block_size=block, queue_depth=depth)
            for block, depth in itertools.product(COARSE_BLOCKS, COARSE_DEPTHS)
        ]
        random.Random(SEED).shuffle(grid)  # a drift during the search must not look like a trend of the grid
        yield from (self.reference, *grid)
        yield from max(self.scores.by_setting, key=self.scores.median).neighbours()
        best = max(self.scores.by_setting, key=self.scores.median)
        yield from (replace(best, engine=other) for other in self._search.engines)
        for count in MORE_RINGS:  # as many bytes in flight
            yield replace(best, engine=engine, queue_depth=max(1, best.queue_depth // count), rings=count)

    def fits(self, setting: Setting) -> bool:
        """Whether the region has enough blocks for it, and it was not tried yet."""
        return setting not in self.scores.by_setting and 16 * setting.block_size * setting.rings <= self._search.size


def run_tune(search: Search) -> dict[str, Any]:
    """Search and choose; gives all of it as one document."""
    if not 0 < search.seconds < math.inf:  # nan neither
        raise KnobError("seconds", f"{search.seconds} is no time to search in; 30 or more tells something")
    check_folder("output", search.output.parent)
    if os.path.lexists(search.output) and not (search.output.is_file() and os.access(search.output, os.W_OK)):
        raise KnobError("output", f"{search.output} is no file that can be written")
    check_settings(search.settings)
    for path in search.paths:
        check_space(path, search.size // len(search.paths))
    with Region(search.paths, search.size, search.direct) as region:
        with RawTarget(search.settings, region) as target:
            engine = target.engine.engine.name
        started = time.monotonic()
        tuner = Tuner(search, region, engine)
        _explore(tuner, started + SEARCH_SHARE * search.seconds)
        finalists = tuner.scores.finalists(tuner.reference)
        _finals(tuner, finalists, started + search.seconds)
    return _conclude(search, tuner, finalists)


def _explore(tuner: Tuner, deadline: float) -> None:
    with progress("searching", TRIALS_PLANNED) as advance:
        for setting in tuner.candidates():
            if time.monotonic() > deadline and tuner.scores.by_setting:
                break
            if not tuner.fits(setting):
                continue
            try:
                said = tuner.trial(setting)
            except EngineUnavailable as error:
                said = f"{setting}: {error}"
            say(said)
            advance(1)


def _finals(tuner: Tuner, finalists: list[Setting], deadline: float) -> None:
    order, before, is_first = random.Random(SEED), time.monotonic(), True
    say(f"{len(finalists)} finalists again ...")
    with progress("finalists", max(1.0, deadline - before)) as advance:
        while is_first or time.monotonic() < deadline:
            for finalist in order.sample(finalists, len(finalists)):
                tuner.trial(finalist)
                before, now = time.monotonic(), before
                advance(before - now)
            is_first = False


def _conclude(search: Search, tuner: Tuner, finalists: list[Setting]) -> dict[str, Any]:
    scores = tuner.scores
    chosen = scores.choose(finalists)
    aio = {
        "engine": "auto" if chosen.engine == tuner.reference.engine else chosen.engine,
        "block_size": format_bytes(chosen.block_size).replace(" ", ""),
        "queue_depth": chosen.queue_depth,
        "rings": chosen.rings,
        "direct": search.direct,
    }
    return {
        "section": {"aio": aio},
        "chosen": asdict(chosen),
        "score": scores.median(chosen),
        "bw_bytes": median(scores.rates[chosen]),
        "noise": scores.noise(finalists),
        "finalists": [asdict(finalist) for finalist in finalists],
        "trials": [
            asdict(setting) | {"scores": values, "bw_bytes": scores.rates[setting]}
            for setting, values in scores.by_setting.items()
        ],
        "environment": environment(list(search.paths)),
        "output": str(search.output),
    }


def tune(
    path: Paths = HERE,
    size: Size = DEFAULT_SIZE,
    seconds: Annotated[float, typer.Option(help="Time to search, about.")] = 60.0,
    direct: Direct = AIO.direct,
    output: Annotated[Path, typer.Option(help="The aio section.")] = Path("aio.json"),
    as_json: Json = False,
) -> None:
    """Find the best `aio` section for a drive.

    Block size, depth, rings and engine are tried on the pattern of a step, which reads and writes alike.
    """
    search = Search(paths=tuple(path), size=size, seconds=seconds, direct=direct, output=output)
    with failures_in_words():
        document = run_tune(search)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = Console()
        console.print_json(data=document["section"])
        console.print(
            f"{document['bw_bytes'] / 1e9:.2f} GB/s read and written together, {document['score']:.2f} of the defaults "
            f"measured beside it; the simplest setting within {document['noise']:.1%} of the best",
            *describe(document["environment"]),
            sep="\n",
            highlight=False,
            soft_wrap=True,
        )
    with failures_in_words():
        output.write_text(json.dumps(document["section"], indent=2) + "\n", encoding="utf-8")
        say_saved([output])

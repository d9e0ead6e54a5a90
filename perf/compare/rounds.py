"""One contender beside ours: both alive, training by turns in the order ours, theirs, theirs, ours."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from nvme_offload.perf.compare.contenders import OURS, Contender
from nvme_offload.perf.compare.records import Ended, Order, Turn
from nvme_offload.perf.measure.child import Child, ChildFailedError
from nvme_offload.perf.measure.comparison import Quad

ITERATIONS = 2
"""Of a turn."""


class Side(Child):
    """A contender's process.

    Args:
        contender: Who.
        python: The interpreter that has its package.
        order: What to do.
        log: File for what it says besides.
    """

    def __init__(self, contender: Contender, python: str, order: Order, log: Path) -> None:
        # A peer that compiles when it is first used looks for its tools on PATH; what it made stays with its packages.
        folder = Path(python).parent
        tools = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        made = {"PATH": tools, "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions")}
        super().__init__([python, "-m", "nvme_offload.perf.compare.worker"], log, {**os.environ, **made})
        self.contender = contender
        self.seconds: list[float] = []
        """Of each iteration."""
        self.losses: list[float] = []
        self.tell(dataclasses.asdict(order))
        self.version: str | None = self.expect("ready")

    def turn(self) -> float:
        """Take a turn; returns the mean seconds of an iteration."""
        self.tell(ITERATIONS)
        turn = Turn(**self.expect("turn"))
        self.seconds += turn.seconds
        self.losses += turn.losses
        return sum(turn.seconds) / ITERATIONS

    def finish(self) -> Ended:
        """End it, its weights written down."""
        self.end_input()
        ended = self.expect("ended")
        self.wait()
        return Ended(**ended)


@dataclass
class Found:
    """What was seen of one contender."""

    contender: Contender
    problem: str | None = None
    """Why it could not train; None: it did."""
    version: str | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    quads: list[Quad] = dataclasses.field(default_factory=list)
    """Seconds of an iteration: ours, theirs, theirs, ours."""
    ended: Ended | None = None
    distance: float | None = None
    """Of its weights from those of the run in memory, over the way that those have come; 0: the same bits."""
    bits_of_ours: bool = False
    """Whether its weights have the bits that ours on NVMe has."""

    @classmethod
    def of_dict(cls, saved: dict[str, Any]) -> Self:
        """What `to_dict` gave."""
        ended = saved["ended"]
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(
            **{name: value for name, value in saved.items() if name in known - {"contender", "quads", "ended"}},
            contender=Contender(**saved["contender"]),
            quads=[Quad(tuple(rates)) for rates in saved["quads"]],
            ended=Ended(**ended) if ended else None,
        )

    @property
    def times_ours(self) -> float | None:
        """Its iteration over ours, the median of the quads."""
        return median(1 / quad.ratio for quad in self.quads) if self.quads else None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {
            **dataclasses.asdict(self),
            "quads": [quad.rates for quad in self.quads],
            "times_ours": self.times_ours,
        }


def beside_ours(contender: Contender, template: Order, folder: Path, quads: int) -> tuple[Found, Found]:
    """Train both by turns; returns what was seen of ours and of the other. One that cannot train says why.

    Args:
        contender: The other.
        template: The order of both, but for who and where.
        folder: On the drive; gets swap, logs and weights of each.
        quads: How many.
    """
    ours, theirs = Found(OURS), Found(contender)
    python = contender.python()
    if python is None:
        theirs.problem = f"{contender.package} is not installed"
        return ours, theirs
    with ExitStack() as stack:
        try:
            other = stack.enter_context(_side(contender, python, template, folder))
        except ChildFailedError as error:
            theirs.problem = str(error).splitlines()[0]
            return ours, theirs
        own = stack.enter_context(_side(OURS, str(OURS.python()), template, folder))
        for _ in range(quads):
            quad = Quad((own.turn(), other.turn(), other.turn(), own.turn()))
            theirs.quads.append(quad)
        for side, found in ((own, ours), (other, theirs)):
            found.ended = side.finish()
            found.seconds, found.losses, found.version = side.seconds, side.losses, side.version
    return ours, theirs


def weights_file(contender: Contender, folder: Path) -> Path:
    """Where its master weights are written."""
    return folder / f"{contender.name}.weights"


def _side(contender: Contender, python: str, template: Order, folder: Path) -> Side:
    swap = folder / contender.name
    swap.mkdir(exist_ok=True)
    order = dataclasses.replace(
        template,
        contender=contender.name,
        package=contender.package,
        swap=str(swap),
        weights=str(weights_file(contender, folder)),
    )
    return Side(contender, python, order, folder / f"{contender.name}.log")

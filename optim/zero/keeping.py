"""Chooses in a first forward, on all ranks alike, what is kept for backward: what `optim.state.choice.Keeping` says."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch.distributed import ProcessGroup

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import BlockOrderError
from nvme_offload.offload.shards.param_tier import KIND as PARAMS
from ..optimizer import OffloadOptimizer
from ..ranks.collective import gather, on_every_rank
from ..state.choice import Keeping, SavedSizes
from ..tiers.grad_tier import KIND as GRADS


class Room(NamedTuple):
    """Bytes that a forward may save on one rank: where it computes, and in host memory."""

    computing: int
    host: int


class KeepingChoice:
    """The choice of one engine: what it is made from, and who hears of it."""

    def __init__(
        self,
        config: OffloadConfig,
        made: OffloadOptimizer,
        room: Room,
        num_blocks: int,
        groups: Sequence[ProcessGroup],
    ) -> None:
        self._config = config
        self._made = made
        self._room = room
        self._num_blocks = num_blocks
        self._groups = groups
        self._waiting = 1
        self._tell: Callable[[OffloadConfig], None] = lambda config: None
        self.goes_one_by_one = False
        """Whether it was chosen that micro-batches go one after the other, where they would go block by block."""

    def tell(self, who: Callable[[OffloadConfig], None]) -> None:
        """Have somebody told the section that comes of the choice."""
        self._tell = who

    def begin(self, micro_batches: int) -> None:
        """Note that so many micro-batches wait for one another at each block."""
        self._waiting = micro_batches

    def choose(self, inside: int, boundary: int, repeats: bool) -> OffloadConfig:
        """Return the section to go on with, when the first block was computed. Collective.

        Raises BlockOrderError where micro-batches are to go one after the other: all of them begin anew.
        """
        if self.goes_one_by_one:
            return self._config
        plan = self._made.tier_plan
        moving = sum(unit.size_bytes for kind in (PARAMS, GRADS) for unit in plan.units_on("nvme", kind))
        sizes = SavedSizes(self._room.computing, inside, boundary, 2 * moving, repeats)
        keeping = Keeping.of([*gather(sizes, *self._groups).values()], self._num_blocks, self._waiting)
        keeping.tell(sizes, self._num_blocks)
        if self._made.is_durable:
            on_every_rank(partial(self._made.durable.commits.run.note_keeping, keeping._asdict()), *self._groups)
        self._config = keeping.applied(self._config, self._room.host)
        self._tell(self._config)
        if keeping.order == "horizontal":
            self.goes_one_by_one = True
            raise BlockOrderError("inputs of blocks would take more bytes than parameters")
        return self._config

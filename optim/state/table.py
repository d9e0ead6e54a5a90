"""Keep one record for each of the optimizer's parameters, with all that is known of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvme_offload.offload._torch_private import without_torch_function
from nvme_offload.offload.devices.device import HOST, is_device, is_host
from nvme_offload.offload.shards.stored import TieredShard
from ..kernels import KernelPool, OnAccelerator, num_marked
from ..layout.flat import Layout, Origin, flat_view, storage_of
from ..layout.master import FORM_OF_DTYPE, TILE_NUMEL, MasterForm, num_tiles
from ..layout.subgroup import Run
from ..rules.rule import UpdateRule
from ..tiers.parts import parts_of
from .marks import WeightMarks

_tile_sums = OnAccelerator().tile_checksums
_FEW = 8
"""One in so many elements has changed, or fewer, where values are kept for a patch: at most 0.75 B a parameter."""


def step_entry(steps: int) -> torch.Tensor:
    """Return a count of steps as torch's optimizers keep it: an fp32 scalar; fp64 where fp32 would round it."""
    return torch.tensor(float(steps), dtype=torch.float32 if steps <= 2**24 else torch.float64, device="cpu")


@dataclass(eq=False)
class ParamRecord:
    """A parameter, where it is, and how far its updates have come."""

    index: int
    """The parameter's number in the optimizer; the runs of subgroups name it so."""
    leaf: torch.Tensor
    """The parameter as the user knows it: it carries the gradient."""
    name: str
    group: int
    """The number of the parameter group that it came with."""
    rule: UpdateRule
    layout: Layout = field(init=False)
    param: torch.Tensor = field(init=False)
    """The part of the parameter that is in this process's memory: see `storage_of`."""
    checksums: torch.Tensor | None = field(init=False)
    """Sums of what the kernel last wrote, int64 per tile of 65536 elements; None for fp32, which is its own master."""
    steps: int = 0
    is_placed: bool = False
    """Whether its state has a place (it has had state, or was trainable when it came)."""
    is_awaited: bool = False
    """Whether the forwards of a plain module wait until it is updated, so that it may be behind a step."""
    sums_on_device: torch.Tensor | None = field(default=None, init=False)
    """`checksums` of tiles whose state is on a device, kept there; None: no state of it is."""
    tiered: TieredShard | None = None
    """Its shard, if that is on the parameter tier."""

    def __post_init__(self) -> None:
        self.param = storage_of(self.leaf)
        self.layout = Layout.of(self.leaf, self.param)
        tiles = num_tiles(self.param.numel())
        self.checksums = None if self.form is MasterForm.ITSELF else torch.zeros(tiles, dtype=torch.int64, device="cpu")
        self.note_place()

    @property
    def form(self) -> MasterForm:
        """Return where the parameter's master weights are."""
        return FORM_OF_DTYPE[self.param.dtype]

    @property
    def log_dtype(self) -> torch.dtype:
        """The dtype that the parameter's gradients are expected to have: wider ones are not logged."""
        parts = parts_of(self.leaf)
        return parts.accumulate if parts is not None else self.param.dtype

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Names of the parameter's entries in ``optimizer.state``."""
        master = () if self.form is MasterForm.ITSELF else ("master",)
        return ("step", *master, *(state.name for state in self.rule.states))

    @property
    def shown_names(self) -> tuple[str, ...]:
        """Names of the entries that torch's optimizer of this rule has, and ``master``."""
        return self.entry_names if self.rule.counts_steps else self.entry_names[1:]

    @property
    def first_rest(self) -> torch.Tensor | None:
        """The rest of the masters of a split shard without state; None if what is stored says all."""
        parts = parts_of(self.leaf)
        return parts.rest if parts is not None else None

    def look_again(self) -> None:
        """Look where the parameter is now; what it was in before is let go."""
        self.param = storage_of(self.leaf)

    def let_wait(self, is_awaited: bool) -> None:
        """Note whether the forwards of a plain module wait until it is updated."""
        self.is_awaited = is_awaited

    def note_place(self) -> None:
        """Look whether the parameter is on the parameter tier now."""
        parts = parts_of(self.leaf)
        if parts is not None and isinstance(parts.stored, TieredShard):
            self.tiered = parts.stored

    def reaching(self, run: Run, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Hold a run of it, 1D [run.numel], outside the step; with `change`, changes are kept."""
        if self.tiered is None:
            return nullcontext(self.view(run))
        return self.tiered.held(change=change, view=lambda: self.view(run))

    def copy_of(self, run: Run) -> torch.Tensor:
        """Return a run of it, to be read on the CPU: a copy, unless it is in host memory for good."""
        with self.reaching(run, change=False) as param:
            # A staging buffer may be another block's right after this.
            return param.clone() if self.tiered is not None else param.cpu()

    def view(self, run: Run) -> torch.Tensor:
        """Return a run of it inside the step, which holds the block of a parameter on a tier."""
        whole = self.tiered.view() if self.tiered is not None else flat_view(self.param)
        return run.part(whole)

    def address(self, run: Run) -> int:
        """Return the address of `view`, without a tensor. The parameter is dense, in host memory."""
        if self.tiered is not None:
            return self.view(run).data_ptr()
        return self.param.data_ptr() + run.start * self.layout.dtype.itemsize

    def checksums_of(self, run: Run, *, on_device: bool = False) -> torch.Tensor | None:
        """Return the checksums of a run, from the device if its state is there; None in fp32."""
        sums = self.sums_on_device if on_device else self.checksums
        return None if sums is None else sums[run.start // TILE_NUMEL : -(-run.stop // TILE_NUMEL)]

    def note_written(self, run: Run, values: torch.Tensor, pool: KernelPool, *, on_device: bool) -> None:
        """Remember what a 16-bit parameter is now, from its values in host memory, so that changes by others show."""
        if self.checksums is None:
            return
        if on_device and self.sums_on_device is None:
            self.sums_on_device = torch.zeros_like(self.checksums, device=self.param.device)
        sums = self.checksums_of(run, on_device=on_device)
        assert sums is not None
        if on_device:
            sums.copy_(_tile_sums(self.view(run)))
        else:
            pool.tile_checksums(values, out=sums)

    def changed_tiles(self, run: Run, values: torch.Tensor, pool: KernelPool, *, on_device: bool) -> list[int]:
        """Return the numbers of a run's tiles that somebody has changed, by the run's values in host memory."""
        known = self.checksums_of(run, on_device=on_device)
        if known is None:
            return []
        found = _tile_sums(self.view(run)) if on_device else pool.tile_checksums(values)
        if torch.equal(found, known):
            return []
        return [int(number) for number in (found != known).nonzero().flatten().tolist()]


class ParamTable:
    """All records, in the order in which parameters came."""

    def __init__(self) -> None:
        self._records: list[ParamRecord] = []
        self._by_id: dict[int, ParamRecord] = {}  # of leaves, which records keep alive
        self._origins: dict[int, Origin] = {}
        self.marks = WeightMarks()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ParamRecord]:
        return iter(self._records)

    def __getitem__(self, index: int) -> ParamRecord:
        return self._records[index]

    def __contains__(self, leaf: object) -> bool:
        return self.find(leaf) is not None

    def log_dtype_of(self, index: int) -> torch.dtype:
        """Return `ParamRecord.log_dtype` of a parameter."""
        return self._records[index].log_dtype

    def origin_of(self, index: int) -> Origin | None:
        """Return the origin of this rank's part of a parameter whose rule dithers."""
        return self._origins.get(index)

    def find(self, leaf: object) -> ParamRecord | None:
        """Return the record of a parameter; None for anything else."""
        return self._by_id.get(id(leaf))

    def of(self, leaf: torch.Tensor) -> ParamRecord:
        """Return the record of a parameter that is known to have one."""
        return self._by_id[id(leaf)]

    def add(
        self, leaf: torch.Tensor, name: str, group: int, rule: UpdateRule, origin: Origin | None = None
    ) -> ParamRecord:
        """Make a record for a parameter that is new to the optimizer."""
        record = ParamRecord(len(self._records), leaf, name, group, rule)
        if origin is not None:
            self._origins[record.index] = origin
        # No call in between: a signal handler sees it in both, or in the first, from which `drop` takes it.
        self._records += (record,)
        self._by_id[id(leaf)] = record
        return record

    def drop(self, first: int) -> None:
        """Forget the records from index `first` on, as far as they were taken on, and versions if these have marks."""
        if any(self.marks.has(record.index) for record in self._records[first:]):
            self.marks.forget()
        for key in [key for key, record in self._by_id.items() if record.index >= first]:
            del self._by_id[key]
        del self._records[first:]

    def note_edits(self, run: Run, values: torch.Tensor, pool: KernelPool, *, on_device: bool) -> None:
        """Mark what somebody has changed of a run, by its values in host memory. Changes of split shards are noted."""
        record = self._records[run.param]
        if not self.marks.has(run.param) or parts_of(record.leaf) is not None:
            return
        if tiles := record.changed_tiles(run, values, pool, on_device=on_device):
            self.marks.note(run, tiles)

    def keep_changes(self, runs: Iterable[Run], step: int, pool: KernelPool) -> None:
        """Keep what a step has changed of runs in host memory, if a patch is expected after it."""
        if not self.marks.latest.expects_patch(step):
            return
        for run in runs:
            marks, numbers = self.marks.of(run), self.marks.latest.numbers.get(run.param)
            if marks is None or numbers is None or num_marked(marks, run.numel) * _FEW > run.numel:
                continue
            if is_host((param := self._records[run.param].view(run)).device):
                found = pool.marked(marks, run.numel, param, first=numbers[0] + run.start, wide=numbers[1])
                self.marks.latest.keep(run, found)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All parameters, as the user knows them."""
        return [record.leaf for record in self._records]

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU, where none is on one."""
        return next((record.param.device for record in self._records if is_device(record.param.device)), HOST)

    @property
    def params(self) -> list[torch.Tensor]:
        """Return what of each parameter is in this process's memory."""
        return [record.param for record in self._records]

    @property
    def has_split_params(self) -> bool:
        """Whether the state has a part of any parameter that FSDP2 gathers."""
        return any(record.layout.is_split and "master" in record.entry_names for record in self._records)

    def check_layouts(self) -> None:
        """Look where parameters are now; raise ValueError for one that no longer lies in memory as it did."""
        for record in self._records:
            record.look_again()
            if not record.layout.fits(record.leaf, record.param):
                raise ValueError(
                    f"{record.name} was {record.layout} and is now {Layout.of(record.leaf, record.param)}: make the "
                    "optimizer after converting a model"
                )

    def note_placed(self, records: Iterable[ParamRecord], is_placed: bool) -> None:
        """Note whether the state of these has its place."""
        for record in records:
            record.is_placed = is_placed

    def count_steps(self, counts: Mapping[int, int]) -> None:
        """Set how many updates parameters have had, by index. It may be cut short and done once more."""
        for index, count in counts.items():
            self._records[index].steps = count

    def members(self, groups: Iterable[Mapping[str, Any]]) -> list[ParamRecord]:
        """Return the records of what is in the groups now. ValueError: a parameter is new here, or in two groups."""
        places: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(groups):
            for place, param in enumerate(group["params"]):
                record = self.find(param)
                if record is None:
                    raise ValueError(
                        f"{_where(number, place)} (shape {tuple(param.shape)}) came into the group after the state of "
                        "this optimizer had its place (the first step, a load, place()): until then whoever shards a "
                        "model may replace parameters, as accelerate does. New ones come with add_param_group"
                    )
                first = places.setdefault(record.index, (number, place))
                if first[0] != number:
                    raise ValueError(
                        f"{_where(*first)} and {_where(number, place)} are the same parameter ({record.name}): which "
                        "hyperparameters it has would be chance; remove it from one of the two"
                    )
        return [self._records[index] for index in sorted(places)]


def _where(group: int, place: int) -> str:
    return f"parameter {place} of group {group}"


class PlacesInTable(NamedTuple):
    """The parameters of a table as the `Places` of a step; `on_device`: their state stays on a device."""

    table: ParamTable
    on_device: bool

    def view(self, run: Run) -> torch.Tensor:
        """See `Places`."""
        return self.table[run.param].view(run)

    def addresses(self, runs: Sequence[Run]) -> list[int]:
        """See `Places`."""
        with without_torch_function():
            return [self.table[run.param].address(run) for run in runs]

    def checksums(self, run: Run) -> torch.Tensor | None:
        """See `Places`."""
        return self.table[run.param].checksums_of(run, on_device=self.on_device)

    def origin(self, run: Run) -> Origin | None:
        """See `Places`."""
        return self.table.origin_of(run.param)

    def marks(self, run: Run) -> torch.Tensor | None:
        """See `Places`."""
        return self.table.marks.of(run, self.table[run.param].param.device if self.on_device else None)

    @property
    def num_marked(self) -> int:
        """See `Places`."""
        return self.table.marks.num_begun

"""Saving and resuming a training run: everything streamed, verified before it is used, replaced only by a whole one."""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_items
from torch.distributed.checkpoint.state_dict_saver import save as save_items

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.errors import CheckpointError, CheckpointWriteError, StateError, SwapIOError
from nvme_offload.offload.progress import progress
from nvme_offload.offload.sync import make_folder
from nvme_offload.offload.units import format_bytes
from nvme_offload.offload.warn import warn_user
from ..access.same_values import differing
from ..access.values import LiveValues, Values
from ..ranks.collective import gather, is_alone, on_every_rank, on_first_rank, this_rank
from ..state.condition import Need
from . import bases, files, run_state, storage
from .contents import MODEL, Contents, StreamedLoadPlanner, StreamedSavePlanner, Wanted, check_fits, contents_of
from .files import FileRecord
from .sites import INDEX, CheckpointSite, FoundCheckpoint, HostsReader


def contents_of_stages(contents: Contents, stages: dist.ProcessGroup | None) -> list[Contents]:
    """Return what the ranks of `stages` have; every rank must call it. Items and values stay where they are."""
    if stages is None:
        return [contents]
    described = Contents(contents.kinds, contents.paths, contents.tied, group_names=contents.group_names)
    return [*gather(described, stages).values()]


def take_on_stages(contents: Contents, stages: list[Contents]) -> None:
    """Add the names of all stages to those of this rank's stage; ValueError if two use the same one."""
    if len(stages) == 1:
        return
    owners: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in (*stage.kinds, *stage.tied):
            if owners.setdefault(name, number) != number:
                raise ValueError(
                    f"stages {owners[name]} and {number} of the pipeline both have {name!r}, and a checkpoint has each "
                    "name once: let stages have the names of the whole model, as ModuleDict({'4': ...}) gives them, "
                    "and register buffers that all stages have with persistent=False"
                )
    contents.group_names[:] = [
        [name for names in of_stages for name in names]
        for of_stages in zip(*(stage.group_names for stage in stages), strict=True)
    ]
    for stage in stages:
        contents.kinds.update(stage.kinds)
        contents.paths.update(stage.paths)
        contents.tied.update(stage.tied)


@dataclass(frozen=True)
class Loaded:
    """A load found this, beside what it put into the `TrainingParts`."""

    path: Path
    client_state: dict[str, Any]
    global_steps: int


@torch.no_grad()
def save(
    training: run_state.TrainingParts, root: Path, tag: str | None, client_state: Mapping[str, Any] | None
) -> Path:
    """Write a checkpoint; every rank must call it. Returns its folder.

    Raises:
        ValueError: the tag, `client_state` or something else cannot be saved; nothing was written.
        FileExistsError: there is something else of that name.
        StateError: a step stopped halfway, or another run is saving into the folder.
        CheckpointWriteError: the drive is full or failed. Nothing of it is left, earlier checkpoints are as they were.
        SwapIOError: state could not be read from its tier; as above.
    """
    store = training.optimizer.store
    on_every_rank(store.wait_until_quiet, training.group)  # what stopped an update is said by all ranks
    with store.at_rest():
        save = agree(training, tag, client_state, lambda: LiveValues(store, ahead=store.slots))
        return write(root, save, CheckpointSite.of(training))


def write(root: Path, save: AgreedSave, site: CheckpointSite) -> Path:
    """Write a checkpoint that all ranks of a group have agreed on; return its folder."""
    with PartialFolder(root, save.tag, site) as partial:
        items = plan_items(partial, save.contents, site)
        with progress("writing the checkpoint", items.size_bytes) as advance:
            own = on_every_rank(lambda: items.write(advance), site.group)
        written = map(storage.RankFile.from_json, site.gather(own.as_json()))
        index = on_first_rank(lambda: index_of(save, items, written), site.group)
        site.keep(lambda: index.write(partial))
        site.keep(lambda: files.publish(partial, save.tag))
        return partial.with_name(save.tag)


@dataclass(frozen=True)
class AgreedSave:
    """All ranks have agreed to save this."""

    tag: str
    contents: Contents
    state: bytes
    """The bytes of the file `STATE`."""
    objects: bytes
    """The bytes of the file `OBJECTS`."""


def agree(
    training: run_state.TrainingParts,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    values: Callable[[], Values],
) -> AgreedSave:
    """Look at what there is to save, and see that all ranks can and mean the same; every rank must call it, `at_rest`.

    `values` gives what is saved of the state, when all of it has its place.
    """
    store, group = training.optimizer.store, training.group

    def prepare() -> tuple[str, Contents]:
        own_tag = f"global_step{training.global_steps}" if tag is None else str(tag)
        files.check_tag(own_tag)
        store.check(Need.STATE)
        store.table.check_layouts()
        store.place_trainable()
        return own_tag, _contents_of(training, values())

    own_tag, contents = on_every_rank(prepare, group)
    if training.has_frozen is None:
        bases.leave_out(contents, training)
    _leave_buffers_to_first(contents, training.copies)
    stages = contents_of_stages(contents, training.stages)

    def describe() -> tuple[bytes, bytes]:
        take_on_stages(contents, stages)
        scalars = run_state.Scalars.of(training)
        return run_state.state_json(scalars, contents), run_state.objects_bytes(scalars, client_state)

    state, objects = on_every_rank(describe, group)
    tag = on_first_rank(lambda: own_tag, group)
    on_every_rank(lambda: _check_same_tag(own_tag, tag), group)
    return AgreedSave(tag, contents, state, objects)


def _leave_buffers_to_first(contents: Contents, copies: Sequence[dist.ProcessGroup]) -> None:
    """Save buffers from the first rank alone, all of them, as DistributedDataParallel does; say so where it matters."""
    if names := differing(contents.buffers, copies):
        warn_user(
            f"save_checkpoint: {len(names)} buffers differ between ranks, such as {names[0]}: the checkpoint has the "
            "first rank's, and every rank that loads it gets these (a durable run keeps each rank's own)"
        )
    if any(dist.get_rank(group) for group in copies):
        contents.items[:] = [item for item in contents.items if item.name not in contents.buffers]


def plan_items(partial: Path, contents: Contents, site: CheckpointSite) -> storage.PlannedItems:
    """Plan who writes what into a new folder; every rank must call it, and see the folder."""
    on_every_rank(lambda: _check_shared(partial, site), site.group)
    planner = StreamedSavePlanner(contents)
    items = storage.PlannedItems(partial, planner, site.host)
    with _one_error(site.group), warnings.catch_warnings():
        if is_alone():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        save_items({}, storage_writer=items, planner=planner, process_group=site.group)
    of_ranks = site.gather((site.keeper, items.size_bytes))
    needed = sum(size_bytes for keeper, size_bytes in of_ranks if keeper == site.keeper)
    site.keep(lambda: _check_room(partial, needed))
    return items


class SavedIndex(NamedTuple):
    """The files of a checkpoint beside those of the ranks, and the records of those."""

    files: Mapping[str, bytes]
    of_ranks: Mapping[str, FileRecord]

    def as_json(self) -> str:
        """Return the same as text, for another process."""
        return json.dumps([{name: b64encode(data).decode() for name, data in self.files.items()}, self.of_ranks])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what another process made. ValueError: it is none, or has files that no index has."""
        said, of_ranks = json.loads(text)
        if said.keys() != set(INDEX):
            raise ValueError(f"an index has the files {', '.join(INDEX)}, not {', '.join(said)}")
        records = {str(name): FileRecord(*record) for name, record in of_ranks.items()}
        return cls({name: b64decode(data) for name, data in said.items()}, records)

    def write(self, partial: Path) -> None:
        """Write them, and the list of all."""
        records = {name: files.write_durably(partial / name, data) for name, data in self.files.items()}
        files.write_manifest(partial, {**self.of_ranks, **records})


def index_of(save: AgreedSave, items: storage.PlannedItems, written: Iterable[storage.RankFile]) -> SavedIndex:
    """Make the index of what all ranks have written, on the first one."""
    written = list(written)
    metadata = storage.metadata_bytes(items.metadata, written, save.contents.tied)
    records = {of_rank.name: of_rank.record for of_rank in written}
    return SavedIndex(
        {storage.METADATA: metadata, run_state.STATE: save.state, run_state.OBJECTS: save.objects}, records
    )


@torch.no_grad()
def load(
    training: run_state.TrainingParts,
    root: Path,
    tag: str | None,
    take_over: Callable[[Loaded], None],
    wanted: Wanted,
) -> Loaded | None:
    """Take what is `wanted` of a checkpoint; every rank must call it. None: `tag` is None and nothing was ever saved.

    `take_over` does what else belongs to a load. Until it is done the optimizer refuses to go on.

    Raises:
        CheckpointError: there is no such checkpoint, or a file of it is missing, damaged or asks to run code.
        ValueError: it does not fit the model, the optimizer or the scheduler. In both cases nothing was changed.
        SwapIOError: a tier failed on the way: part of the state is old and part is new; load again.
    """
    store = training.optimizer.store
    store.check_usable()
    site = CheckpointSite.of(training)
    found = site.found(root, tag)
    if found is None:
        why = f"no file {files.LATEST!r}" if on_first_rank(root.is_dir, site.group) else "there is no such folder"
        warn_user(f"{root} holds no checkpoint ({why}): nothing is loaded")
        return None
    on_every_rank(lambda: _verify_share(found, dist.get_rank(site.group)), site.group)
    with store.at_rest(forgiving=True):
        return _load(training, found, site, take_over, wanted)


def _load(
    training: run_state.TrainingParts,
    found: FoundCheckpoint,
    site: CheckpointSite,
    take_over: Callable[[Loaded], None],
    wanted: Wanted,
) -> Loaded:
    store, group, folder = training.optimizer.store, training.group, found.folder

    def prepare() -> tuple[LiveValues, Contents]:
        store.table.check_layouts()
        store.place_trainable()
        values = LiveValues(store, anew=wanted.strict and wanted.optimizer)
        return values, _contents_of(training, values)

    values, contents = on_every_rank(prepare, group)
    stages = contents_of_stages(contents, training.stages)

    def compare() -> tuple[Metadata, run_state.RunState]:
        take_on_stages(contents, stages)
        if wanted.optimizer:
            run_state.check_same_optimizer(folder, training)
        saved = storage.read_metadata(folder, found.manifest)
        bases.narrow(contents, run_state.read_in_files(folder), saved.state_dict_metadata, store.blocks.bases)
        metadata = contents.narrow(wanted, saved)
        check_fits(contents, metadata)
        return metadata, run_state.read_state(folder, training, contents, wanted)

    metadata, state = on_every_rank(compare, group)
    store.pipeline.forget_failures()
    store.begin_load()
    numel = sum(item.chunk.saved.sizes.numel() for item in contents.items)
    with _one_error(group), progress("loading the checkpoint", numel) as advance:
        planner = StreamedLoadPlanner(contents, advance)
        reader = HostsReader(found, metadata, group) if site.host else storage.VerifiedReader(folder, metadata)
        load_items({}, storage_reader=reader, planner=planner, process_group=group)

    def finish() -> None:
        planner.finish()
        values.release()
        store.pipeline.synchronize()

    on_every_rank(finish, group)
    store.table.count_steps({index: int(step) for index, step in contents.steps.items()})
    run_state.apply_state(state, training, wanted)
    loaded = Loaded(folder, state.client_state, state.global_steps)
    take_over(loaded)
    store.be_whole()  # last: whatever stopped it, the load is done or it is not
    return loaded


def _contents_of(training: run_state.TrainingParts, values: Values) -> Contents:
    contents = contents_of(training.model, training.optimizer.store, values)
    contents.group_names.extend(run_state.names_of_groups(training.optimizer, contents))
    if training.has_frozen is False:
        placed = set(contents.names.values())
        params = dict(training.model.named_parameters(remove_duplicate=False))
        frozen = {f"{MODEL}.{name}" for name, param in params.items() if not param.requires_grad and name not in placed}
        contents.keep(contents.kinds.keys() - frozen)
    return contents


class PartialFolder(AbstractContextManager[Path]):
    """The folder to write into, on every rank; if the block fails, nothing of it is left."""

    def __init__(self, root: Path, tag: str, site: CheckpointSite) -> None:
        self._root, self._tag, self._site = root, tag, site
        self._partial = root / (tag + files.PARTIAL)
        self._lock: Descriptor | None = None

    def __enter__(self) -> Path:
        try:
            self._root = self._root if self._site.host else on_first_rank(lambda: self._root, self._site.group)
            self._partial = self._root / (self._tag + files.PARTIAL)
            self._site.keep(self._begin)
            return self._partial
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError) and not isinstance(error, FileExistsError | StateError):
                raise CheckpointWriteError(error.errno or errno.EIO, self._partial) from error
            raise

    def _begin(self) -> None:
        make_folder(self._root)
        self._lock = files.locked(self._root)
        files.begin(self._root, self._tag)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                return
            if self._site.is_keeper:
                with suppress(OSError):  # the drive has failed; the next save removes it
                    files.discard(self._partial, self._tag)
            if isinstance(error, OSError) and not isinstance(error, SwapIOError | CheckpointWriteError):
                said = CheckpointWriteError(error.errno or errno.EIO, self._partial)
                for note in getattr(error, "__notes__", ()):  # on which rank
                    said.add_note(note)
                raise said from error
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()


@contextmanager
def _one_error(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise what went wrong on the first rank where something did, in place of the collection that torch raises."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if not is_alone():  # all ranks come here
            cause.add_note(f"on {[*gather(this_rank(), group).values()][rank]}")
        raise cause from None


def _check_same_tag(own: str, first: str) -> None:
    if own != first:
        raise ValueError(f"tag {own!r} on rank {dist.get_rank()}, {first!r} on rank 0: every rank must give the same")


def _check_shared(partial: Path, site: CheckpointSite) -> None:
    if not partial.is_dir():
        what = f"was made by rank {site.keeper} and is not there for {this_rank()}"
        where = "a folder that all machines share, or write checkpoint.use_node_local_storage = true"
        if site.host:
            where = "a folder that all ranks of a host see"
        raise CheckpointError(partial, f"{what}: save into {where}")


def _check_room(partial: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(partial).free):
        detail = f"needed {format_bytes(needed)}, free {format_bytes(free)}"
        raise CheckpointWriteError(errno.ENOSPC, partial, detail)


def _verify_share(found: FoundCheckpoint, rank: int) -> None:
    own = found.share_of(rank)
    with progress("verifying the checkpoint", sum(found.manifest[name].size_bytes for name in own)) as advance:
        for name in own:
            files.verify(found.folder / name, found.manifest[name], advance)

"""A checkpoint of a pinned step that is written in a thread, while training goes on."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import Flag, start
from nvme_offload.offload._torch_private import store_of_all_ranks
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.errors import CheckpointWriteError
from nvme_offload.offload.warn import warn_user
from ..access.values import CommittedValues
from ..durable.commits import random_id
from ..kernels import KernelPool
from ..ranks.collective import on_every_rank, on_first_rank
from ..updates.logs import SlotLogs
from . import files
from .run_state import TrainingParts
from .save_load import AgreedSave, PartialFolder, SavedIndex, agree, index_of, plan_items
from .sites import CheckpointSite
from .storage import PlannedItems, RankFile

_KEY = "nvme_offload/checkpoint"
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 600.0
"""Other ranks are given up when none of them has gone on for so long."""


class Others:
    """The ranks that write one checkpoint.

    Args:
        store: of all of them.
        save: is of this checkpoint alone.
        rank: this one.
        where: the folder, for errors.
    """

    def __init__(self, store: Store, save: str, rank: int, where: object) -> None:
        self._store = store
        self._save = save
        self._rank = rank
        self._where = where

    def say(self, what: str, value: bytes = b"") -> None:
        """Let the others know that this rank has got so far. What it said of an earlier save is forgotten."""
        key = self._key(what, self._rank)
        self._set(f"{key}/value", value)
        self._set(key, self._save.encode())

    def say_failed(self, failure: BaseException) -> None:
        """Say that this rank goes no further; who waits for it need not any longer."""
        with suppress(RuntimeError):  # the store has ended, as what waits for this rank will notice
            self._set(
                f"{_KEY}/failure",
                f"on rank {self._rank}, host {socket.gethostname()}: {type(failure).__name__}: {failure}".encode(),
            )
            self._set(f"{_KEY}/failed", self._save.encode())

    def go_on(self) -> None:
        """Let who waits know that this rank is at work."""
        self._store.add(f"{_KEY}/items", 1)

    def heard(self, what: str, ranks: Iterable[int]) -> list[bytes]:
        """Return what ranks have said, when all of them have; raises CheckpointWriteError where one never will."""
        return [self._heard_of(rank, self._key(what, rank)) for rank in ranks]

    def _heard_of(self, rank: int, key: str) -> bytes:
        since, before = time.monotonic(), -1
        while not self._has_said(key):
            if self._has_said(f"{_KEY}/failed"):
                raise self._lost(errno.EIO, self._store.get(f"{_KEY}/failure").decode())
            if (now := self._store.add(f"{_KEY}/items", 0)) != before:
                since, before = time.monotonic(), now
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                raise self._lost(errno.ETIMEDOUT, f"nothing is heard of rank {rank}")
            time.sleep(_LOOK_SECONDS)
        return self._store.get(f"{key}/value")

    def _has_said(self, key: str) -> bool:
        return self._store.check([key]) and self._store.get(key) == self._save.encode()

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are what it takes and gives

    def _key(self, what: str, rank: int) -> str:
        return f"{_KEY}/{what}/{rank}"

    def _lost(self, code: int, said: str) -> CheckpointWriteError:
        return CheckpointWriteError(code, str(self._where), said)


class Share:
    """Lets work take at most a share of the time, in small pieces."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._begun = time.monotonic()
        self._hurried = Flag()

    def rest(self) -> None:
        """Rest after a piece of the work, in proportion to the time that it took."""
        worked = time.monotonic() - self._begun
        self._hurried.wait(worked * (1 / self._share - 1))
        self._begun = time.monotonic()

    def hurry(self) -> None:
        """Rest no more: somebody waits."""
        self._hurried.set()


class BackgroundSave:
    """Writes what was planned, and has `end` make a checkpoint of it and what others write. Begins at once."""

    def __init__(
        self, items: PlannedItems, pace: Share, others: Others, end: Callable[[RankFile], None], on_exit: ExitStack
    ) -> None:
        self._items = items
        self._pace = pace
        self._others = others
        self._end = end
        self._on_exit = on_exit
        self._done_bytes = 0
        self.failure: BaseException | None = None
        """The error that it failed with; nothing of it is left then."""
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        # An interpreter that ends while a thread works in C++ has that unwound where C++ allows it nowhere: abort.
        self._finalizer = finalize(self._thread, self.join)
        start(self._thread)

    @property
    def progress(self) -> float:
        """Return how much of this rank's part is written, 0 to 1."""
        return min(1.0, self._done_bytes / max(self._items.size_bytes, 1))

    def join(self) -> None:
        """Wait until it has ended, which takes no longer than a save that nobody trains beside."""
        self._pace.hurry()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._on_exit:
                self._write()
        except BaseException as failure:
            self.failure = failure
            warn_user(f"the checkpoint in the background failed, and training goes on: {failure}", of_this_rank=True)
        finally:
            self._finalizer.detach()  # it knows all that was written

    def _write(self) -> None:
        try:
            self._end(self._items.write(self._advance))
        except BaseException as failure:
            self._others.say_failed(failure)
            raise

    def _advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._others.go_on()
        self._pace.rest()


@torch.no_grad()
def begin_save(
    training: TrainingParts,
    manifest: Manifest,
    root: Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    share: float,
) -> BackgroundSave:
    """Begin to write the checkpoint that `save_load.save` would write now; every rank must call it.

    `manifest` is of this step, and pinned until it is written. If this raises, as `save` does, nothing has begun.
    """
    store, group = training.optimizer.store, training.group
    durable = training.optimizer.durable.commits.durable

    def values() -> CommittedValues:
        extents, period = durable.run.extents, durable.period
        logs = SlotLogs(extents, store.table, KernelPool(1), period)
        return CommittedValues(store.slots, logs, durable.run.space, manifest)

    with store.at_rest(), ExitStack() as on_exit:
        save = agree(training, tag, client_state, values)
        site = CheckpointSite.of(training)
        folder = on_exit.enter_context(PartialFolder(root, save.tag, site))
        items = plan_items(folder, save.contents, site)
        on_every_rank(items.keep_aside, group)
        number = on_first_rank(random_id, group)
        others = Others(store_of_all_ranks(), number, dist.get_rank(group), folder)
        end = partial(_end, folder, save, items, site, others)
        return BackgroundSave(items, Share(share), others, end, on_exit.pop_all())


def _end(
    folder: Path, save: AgreedSave, items: PlannedItems, site: CheckpointSite, others: Others, written: RankFile
) -> None:
    """Say what this rank has written; if it keeps a folder, wait for what belongs there, and give it its name."""
    others.say("written", written.as_json().encode())
    if not site.is_keeper:
        return
    try:
        if site.keeper == site.keepers[0]:
            of_all = others.heard("written", range(dist.get_world_size(site.group)))
            index = index_of(save, items, (RankFile.from_json(said.decode()) for said in of_all))
            others.say("index", index.as_json().encode())
        [said] = others.heard("index", site.keepers[:1])
        SavedIndex.from_json(said.decode()).write(folder)
        others.say("whole")
        others.heard("whole", site.keepers)
        files.publish(folder, save.tag)
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise CheckpointWriteError(error.errno or errno.EIO, folder) from error

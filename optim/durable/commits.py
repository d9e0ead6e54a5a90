"""Commits of an optimizer's state: each step is made to last while the next forward computes.

What belongs to a step is encoded when it ends. Its last writes may then still be under way, and where updates are done
behind the step they may not even have begun. When the updates are done, a thread waits for the writes, has the drive
keep them, and writes the manifest. Nothing of the next step is written before that.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nvme_offload.offload.durable.committer import Committer
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.errors import OutOfSpaceError, StateError
from nvme_offload.optim.durable.content import Content
from nvme_offload.optim.durable.identity import ModelRecord, identity_of
from nvme_offload.optim.durable.ranks import Ranks
from nvme_offload.optim.durable.snapshots import SnapshotsOfRanks
from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.state.condition import Need, StepPhase
from nvme_offload.optim.state.masters import read_master, write_master
from nvme_offload.optim.state.pipeline import HeldState
from nvme_offload.optim.state.sealing import Sealing
from nvme_offload.optim.state.slots import Residency, SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.warn import warn_user

Groups = Sequence[Mapping[str, Any]]

_ID_BYTES = 16

logger = logging.getLogger(__name__)


class _Agreed(NamedTuple):
    """What the ranks have told each other of the run."""

    num_params: int = -1
    """Parameters with state that there were when they did."""
    uuid: str = ""
    history: str = ""
    """Random: see `Commits.begin_history`."""


class Commits:
    """Takes commits of one optimizer, one at a time.

    Args:
        store: the optimizer's state.
        sealing: of that store.
        meter: of the optimizer; commits are on its timeline.
        norm_group: further ranks that step with this one.
    """

    def __init__(self, store: StateStore, sealing: Sealing, meter: Meter, norm_group: dist.ProcessGroup | None) -> None:
        self.client_state: dict[str, Any] = {}
        """The user's own, committed with every step: see `OffloadOptimizer.client_state`."""
        self.step = 0
        """Steps that the run has taken or skipped, those before a resume included."""
        self.tick = 0
        """Number of the latest commit that was begun."""
        self.committed_step: int | None = None
        """The latest step that lasts; None before the first."""
        self.commit_failure: str | None = None
        """Why the latest commit failed; None where it lasts, or is under way."""
        self.checkpoint_progress: Callable[[], float | None] = lambda: None
        """How much of a checkpoint in the background is written, 0 to 1; None where there is none."""
        self.of_engine = False
        """Whether a training engine says when a step is over, and adds to it."""
        self.model = ModelRecord()
        """What a training engine says of its model."""
        self.store = store
        self.sealing = sealing
        self.run: DurableRun = sealing.run
        self._meter = meter
        self._norm_group = norm_group
        self._committer = Committer()
        self._pending: tuple[int, bytes, str] | None = None
        """Step, content and identity of the commit that was taken and has not begun."""
        self._has_failed = False
        self._has_begun = False
        self.is_settled = True
        """Whether every rank knows of the latest commit whether it lasts on all, so that each may write."""
        self._said: tuple[object, ...] | None = None
        """What has been said of the commits that fail, until one lasts."""
        self._agreed = _Agreed()
        self._num_identified = -1
        self._ranks: tuple[int, Ranks] | None = None
        sealing.before_write = self._committer.wait
        begin = weakref.WeakMethod(self._begin_pending)
        store.after_updates = lambda: None if (method := begin()) is None else method()

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about commits."""
        return {
            "commits": self._committer.num_committed,
            "failed_commits": self._committer.num_failed,
            "commit_failure": self.commit_failure,
            "commit_seconds": self._committer.commit_seconds,
            "commit_wait_seconds": self._committer.waited_seconds,
            "committed_step": self.committed_step,
            "checkpoint_progress": self.checkpoint_progress(),
        }

    @property
    def is_busy(self) -> bool:
        """Whether a commit is under way, so that nothing may be written."""
        return self._committer.is_busy

    @property
    def _num_placed(self) -> int:
        """Parameters that have state: the same on all ranks, also where some have an empty part of one."""
        return sum(record.is_placed for record in self.store.table)

    def ranks(self) -> Ranks:
        """The ranks that step together."""
        num_params = len(self.store.table)
        if self._ranks is None or self._ranks[0] != num_params:
            self._ranks = num_params, Ranks(self.store.table.leaves, self._norm_group)
        return self._ranks[1]

    def snapshots(self) -> SnapshotsOfRanks:
        """Snapshots of the ranks that step together."""
        return SnapshotsOfRanks(self.run, self.ranks())

    def end_step(self, groups: Groups, step: int, engine: Mapping[str, Any] | None = None) -> None:
        """A step is over: commit it as it is now, behind the caller's back.

        Args:
            groups: the optimizer's parameter groups.
            step: how many the run has taken or skipped.
            engine: what a training engine adds.

        Raises:
            ValueError: something cannot be committed; names it. The step is done, and the next one can be.
        """
        self.step = step
        if not self._num_placed:  # nothing has had a gradient so far
            return
        self.tick += 1  # whatever fails here: ranks that end the same step have the same one
        if not self.is_settled:  # a step without gradients, which had nothing to wait for
            self.settle()
        self.is_settled = False
        try:
            with torch.no_grad():
                self._prepare()
                self._take(groups, engine or {})
        except OSError as error:
            self.sealing.begins_turn = True
            self._note_failure(error)
        except BaseException as error:
            self.sealing.begins_turn = True
            error.add_note(f"Step {step} is complete, and is not committed: a later commit has what it changed.")
            raise
        if self.store.is_whole:
            with self.store.worker.kept_away():
                self._begin_pending()

    def settle(self) -> bool:
        """Wait for the commit under way, and say in a warning that it failed; whether it did not.

        Collective where several ranks step together: it lasts on all of them, or on none.
        """
        had_begun = self._has_begun
        lasts, self._has_begun, self.is_settled = self._settle_own(), False, True
        ranks = self.ranks()
        if ranks.several and not ranks.all(lasts):
            if lasts and had_begun:
                self.run.take_back()
                self.committed_step = next((manifest.step for manifest in self.run.committed), None)
                self._say_failed(StateError("another rank", "a commit that lasts", "one that failed, as it says there"))
            return False
        if lasts and had_begun:
            self._note_lasting()
        return lasts

    def commit(self, groups: Groups, engine: Mapping[str, Any] | None = None) -> None:
        """Commit what there is now, parameters that somebody changed included; it lasts when this returns.

        Raises:
            StateError: a step stopped halfway, or the commit failed on another rank.
            SwapIOError, OutOfSpaceError: it failed here. The commit before is whole.
            ValueError: something cannot be committed; names it.
        """
        store = self.store
        self.tick += 1
        with store.at_rest(), torch.no_grad():
            store.check(Need.STATE)
            self.settle()
            self._prepare()
            for slot in store.slots:
                if self.sealing.is_changed(slot):
                    self._rewrite(slot)
            self._take(groups, engine or {})
            self._begin_pending()
        self._committer.wait()
        failure = self._committer.take_failure()
        if failure is not None:
            self._has_failed, self.commit_failure = True, str(failure)
        if not self.settle():
            raise failure or StateError("commit", "a commit that lasts on every rank", "one that failed on another")

    def snapshot(self, name: str) -> int:
        """Keep the latest step under a name, on every rank or on none; returns the step. No byte of state is moved.

        Raises:
            StateError: a step stopped halfway, or does not last.
            ValueError, OutOfSpaceError, SwapIOError: see `DurableRun.prepare_snapshot`; nothing is kept on any rank.
        """
        store = self.store
        with store.at_rest():
            store.check(Need.STATE)
            self._begin_pending()
            if not self.settle():
                raise StateError("snapshot", "a step that lasts on every rank", "one whose commit failed")
            self.snapshots().take(name)
        assert self.committed_step is not None
        return self.committed_step

    def hold(self, groups: Groups, engine: Mapping[str, Any] | None = None) -> Manifest:
        """Have what there is now committed, and keep it until `let_go`, or until the process ends.

        Every rank must call it; it holds on all of them, or on none.

        Raises:
            OutOfSpaceError: there is no room for what later steps write in its place.
            StateError, SwapIOError, ValueError: see `commit`.
        """
        store = self.store
        with store.at_rest():
            store.check(Need.STATE)
            self._begin_pending()
            changed = not self.settle() or not self.run.committed or bool(self.run.extents.uncommitted)
            changed = changed or any(self.sealing.is_changed(slot) for slot in store.slots)
            if not self.ranks().all(not changed):
                self.commit(groups, engine)
            problem, held = None, None
            try:
                held = self.run.hold()
            except OSError as error:
                problem = error
            if not self.ranks().all(held is not None):
                if held is not None:
                    self.run.let_go()
                raise problem or StateError("hold", "room for a pinned step on every rank", "none on another one")
            assert held is not None
            return held

    def let_go(self) -> None:
        """Give up what `hold` kept."""
        with self.store.at_rest():
            self._committer.wait()
            self.run.let_go()

    def remove_snapshot(self, name: str) -> None:
        """Give up what `snapshot` kept, on every rank.

        Raises:
            KeyError: there is none of this name.
        """
        with self.store.at_rest():
            self._begin_pending()
            self.settle()
            self.snapshots().remove(name)

    def close(self) -> None:
        """Wait for what is under way and end the thread. Idempotent; no-op in a forked child."""
        if not self.store.is_own_process:
            return
        store = self.store
        if not store.is_closed:
            store.end_begun()
            store.worker.wait_until(lambda: store.record_in(StepPhase.BEHIND) is None)
            if store.is_whole:
                with store.worker.kept_away():
                    self._begin_pending()
        if self._settle_own() and self._has_begun:
            self.commit_failure = None
        if self.commit_failure is not None:
            warn_user(f"step {self.step} was the latest, and is not committed ({self._last}): {self.commit_failure}")
        self._committer.close()

    def identify(self) -> None:
        """Say what the run is from now on. Collective where several ranks step together, when parameters came."""
        if self._num_identified == self._num_placed:
            return
        if self._agreed.num_params != self._num_placed:  # not again by one rank alone, whose drive did not take it
            ranks = self.ranks()
            known = ranks.gather(ranks.together(self._own_uuid))
            self.tick = max(tick for _, _, tick, _ in known.values())
            self.begin_history(drawn for _, _, _, drawn in known.values())
            self._agreed = self._agreed._replace(num_params=self._num_placed, uuid=min(known.values())[1])
        self.run.identify(self.identity(), self._agreed.uuid)
        self._num_identified = self._num_placed

    def _own_uuid(self) -> tuple[bool, str, int, str]:
        """Whether the run is new here, what this rank would call it, its next tick, and a number for its history."""
        # A run that is loaded over counts on: of two commits the later one has the larger number on every rank.
        ticks = [Content.decode(manifest.blob, self.run.folder).tick + 1 for manifest in self.run.committed]
        return self.run.uuid is None, self.run.uuid or random_id(), max([self.tick, *ticks]), random_id()

    def begin_history(self, drawn: Iterable[str]) -> None:
        """Give the commits from here on identities that no other commits have, and all ranks alike.

        An identity is a digest of a random number and the tick. The number is drawn anew wherever ticks may be counted
        again: it travels with what ranks tell each other there anyway, and steps need no further word.

        Args:
            drawn: what each rank has drawn (`random_id`).
        """
        self._agreed = self._agreed._replace(history=min(drawn))

    def identity(self) -> dict[str, Any]:
        """What the run is now: see `identity_of`."""
        return identity_of(self.store, self.sealing, self.model)

    def note_adopted(self, content: Content) -> None:
        """The run goes on from here."""
        self.step = self.committed_step = content.step
        self.tick = content.tick
        self.client_state = dict(content.client_state)

    def _settle_own(self) -> bool:
        self._committer.wait()
        failure = self._committer.take_failure()
        if failure is not None:
            self._note_failure(failure)
        lasts, self._has_failed = not self._has_failed, False
        return lasts

    @property
    def _last(self) -> str:
        return "none lasts so far" if self.committed_step is None else f"step {self.committed_step} lasts"

    def _note_failure(self, failure: BaseException) -> None:
        self._has_failed = True
        self._say_failed(failure)

    def _say_failed(self, failure: BaseException) -> None:
        """Once for each cause, until a commit lasts: a disk may be full for thousands of steps."""
        self.commit_failure = str(failure)
        cause = type(failure), getattr(failure, "errno", None), getattr(failure, "path", None)
        if cause != self._said:
            self._said = cause
            warn_user(
                f"a step could not be committed, and training goes on ({self._last}): {failure}. Each further step is "
                "tried; what fails for the same reason is not said again"
            )

    def _note_lasting(self) -> None:
        self.commit_failure = None
        if self._said is not None:
            self._said = None
            logger.warning("commits succeed again: %s", self._last)

    def explain(self, error: BaseException) -> None:
        """Add to an error that a step ends with what commits that fail have to do with it."""
        if isinstance(error, OutOfSpaceError) and self.commit_failure is not None:
            error.add_note(
                f"Commits fail ({self._last}: {self.commit_failure}), and what the latest one refers to is not written "
                "over: until one succeeds further steps need more space, with rewrite_every above 1."
            )

    def _prepare(self) -> None:
        """See that the run knows what it is, and that there is something to commit of every subgroup."""
        store = self.store
        if self._num_identified != self._num_placed:
            self._settle_own()
            with store.at_rest():
                self.identify()
                unborn = [slot for slot in store.slots if slot.residency is Residency.UNBORN]
                for position, slot in enumerate(unborn):
                    store.pipeline.acquire(unborn, position)
                    store.pipeline.will_change(slot)
                    store.pipeline.release(slot)
        if self.run.extents.suspects:
            with store.at_rest():
                for index in sorted(self.run.extents.suspects):
                    self._write_again(store.slots[index])

    def _take(self, groups: Groups, engine: Mapping[str, Any]) -> None:
        behind = self.store.record
        counts = behind.inputs.counts if behind is not None else {}
        content = Content.taken(self.step, self.tick, self.store.table, counts, groups, self.client_state, engine)
        said = f"{self._agreed.history} {self.tick}".encode()
        self._pending = self.step, content.encode(), hashlib.blake2b(said, digest_size=_ID_BYTES).hexdigest()

    def _begin_pending(self) -> None:
        """Begin the commit of what was taken, when all updates are done; in a turn of the worker, or with it away."""
        pending = self._pending
        if pending is None or not self.store.is_whole:
            return
        self._pending = None
        self.sealing.begins_turn = True
        if self._committer.is_busy:  # after a step that had no gradient, and so nothing to wait for
            self._settle_own()
        try:
            writes = self.store.pipeline.writes_under_way()
        except OSError as error:
            self._note_failure(error)
            return
        self._has_begun = self.sealing.is_held = True
        self._committer.begin(self._commit_of(*pending, [write.wait for write in writes]))

    def _commit_of(
        self, step: int, blob: bytes, commit_id: str, waits: Sequence[Callable[[], object]]
    ) -> Callable[[], None]:
        def commit() -> None:
            try:
                for wait in waits:
                    wait()
                with self._meter.passing("commit"):
                    self.run.commit(step, blob, self.run.extents.tables, commit_id)
                self.committed_step = step
            finally:
                self.sealing.is_held = False
                self.store.worker.bell.ring()  # who has something to write looks again

        return commit

    def _rewrite(self, slot: SlotRecord) -> None:
        """Have masters start from parameters that somebody changed, as the next update would, and write them."""
        store = self.store
        with HeldState(store.pipeline, slot, change=True) as memory:
            if slot.subgroup.form is MasterForm.ITSELF:
                return
            for run in slot.subgroup.runs:
                master = read_master(run, slot, memory, store.table, store.kernels)
                write_master(run, master, slot, memory, store.table, store.kernels)

    def _write_again(self, slot: SlotRecord) -> None:
        with HeldState(self.store.pipeline, slot, change=True):
            pass


def random_id() -> str:
    """32 random hexadecimal digits. They come from the system: those of the training must not change by it."""
    return secrets.token_hex(_ID_BYTES)

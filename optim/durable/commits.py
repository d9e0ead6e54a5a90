"""Commit an optimizer's state: each step is made to last while the next forward computes.

One subgroup in three steps, with ``rewrite_every`` 2. Its chain is a base and the entries behind it; the tail has the
parameters as they were with the base. The last column is the newest manifest, and the `CommitState` that follows::

    step  done by            turn  tail  chain  manifest
    1     updates            1     1     1      -  SETTLED    the worker may still do them when the step has ended
    1     `end_step`         1     1     1      -  PENDING    what belongs to the step is encoded, as it is now
    1     `begin_pending`    1     1     1      -  UNDER_WAY  updates are done; a thread waits for their writes
    1     `wait`             1     1     1      1  LASTING    the thread had the drive keep them, then the manifest
    2     `settle`           1     1     1      1  SETTLED    on all ranks, or on none: from here on each may write
    2     updates            2     1     1 + 2  1  SETTLED    entry 2 is written; base 1 is what manifest 1 refers to
    2     as in step 1       2     1     1 + 2  2  LASTING
    3     `settle`, updates  3     3     3      2  SETTLED    base 3 goes elsewhere: manifest 2 refers to 1 + 2
    3     as in step 1       3     3     3      3  LASTING    base 1 and entry 2 may be written over in turn 4
"""

import hashlib
import logging
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from nvme_offload.offload.durable.identity import Encoded
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.errors import OutOfSpaceError, StateError
from nvme_offload.offload.warn import warn_user
from ..layout.master import MasterForm
from ..ranks.collective import Ranks, this_rank
from ..state.condition import Need
from ..state.masters import read_master, write_master
from ..state.pipeline import HeldState
from ..state.slots import Residency, SlotRecord
from ..state.store import StateStore
from .content import Content
from .identity import ModelRecord, identity_of
from .latest import CommitState, Taken
from .snapshots import SnapshotsOfRanks
from .state import DurableState

Groups = Sequence[Mapping[str, Any]]

_ID_BYTES = 16

logger = logging.getLogger(__name__)


class _Agreed(NamedTuple):
    """The ranks have told each other this of the run."""

    num_params: int = -1
    """Parameters with state that there were when they did."""
    uuid: str = ""
    hosts: Mapping[str, str] = {}
    """By the number of the rank."""
    history: str = ""
    """Random: see `Commits.begin_history`."""


class Background(Protocol):
    """A checkpoint that is written in the background, of a step that `pin` keeps."""

    @property
    def progress(self) -> float:
        """The share of it that is written, 0 to 1."""

    @property
    def failure(self) -> BaseException | None:
        """The error that it failed with."""

    def join(self) -> None:
        """Wait for its end."""


class Commits:
    """Takes commits of one optimizer, one at a time: see `optim.durable.latest` for what holds meanwhile."""

    def __init__(self, store: StateStore, durable: DurableState, norm_group: dist.ProcessGroup | None) -> None:
        self.client_state: dict[str, Any] = {}
        """The user's own, committed with every step: see `OffloadOptimizer.client_state`."""
        self.step = 0
        """Steps that the run has taken or skipped, those before a resume included."""
        self.tick = 0
        """Number of the latest commit that was begun."""
        self.engines_model: ModelRecord | None = None
        """A training engine says this of its model, and says when a step is over; None: there is none."""
        self.store = store
        self.durable = durable
        self._norm_group = norm_group
        self._background: Background | None = None
        self._said: tuple[object, ...] | None = None
        """The latest cause that was said of commits that fail, until one lasts."""
        self._agreed = _Agreed()
        self._num_identified = -1
        self._ranks: tuple[int, Ranks] | None = None

    @property
    def run(self) -> DurableRun:
        """The run that is committed."""
        return self.durable.run

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about commits."""
        progress = None if self._background is None else self._background.progress
        return self.durable.latest.stats | {"checkpoint_progress": progress}

    @property
    def is_settled(self) -> bool:
        """Whether every rank knows of the latest commit whether it lasts on all, so that each may write."""
        return self.durable.latest.state is CommitState.SETTLED

    def serve(self, model: ModelRecord) -> None:
        """Have a training engine say from now on when a step is over, and add to it."""
        self.engines_model = model

    @property
    def _num_placed(self) -> int:
        """Parameters that have state: the same on all ranks, also where some have an empty part of one."""
        return sum(record.is_placed for record in self.store.table)

    def ranks(self) -> Ranks:
        """Return the ranks that step together."""
        num_params = len(self.store.table)
        if self._ranks is None or self._ranks[0] != num_params:
            self._ranks = num_params, Ranks(self.store.table.leaves, self._norm_group)
        return self._ranks[1]

    def snapshots(self) -> SnapshotsOfRanks:
        """Return the snapshots of the ranks that step together."""
        return SnapshotsOfRanks(self.run, self.ranks())

    def end_step(self, groups: Groups, step: int, engine: Mapping[str, Any] | None = None) -> None:
        """Commit the step that is over as it is now, behind the caller's back.

        `step` is how many the run has taken or skipped. ValueError names what cannot be committed: the step is done,
        and the next one can be taken.
        """
        self.step = step
        if not self._num_placed:  # nothing has had a gradient so far
            return
        self.tick += 1  # whatever fails here: ranks that end the same step have the same one
        if not self.is_settled:  # a step without gradients, which had nothing to wait for
            self.settle()
        try:
            with torch.no_grad():
                self._prepare()
                self._take(groups, engine or {})
        except OSError as error:
            self.durable.latest.fail(error)
            if self.store.has_unfinished_step:  # it has stopped the updates, and is raised by who waits for these
                self.store.worker.note_failure(error)
            else:
                self._say_failed(error)
        except BaseException as error:
            self.durable.latest.fail(error)
            self._said = _cause_of(error)  # it is raised: no warning says it once more
            error.add_note(f"Step {step} is complete, and is not committed: a later commit has what it changed.")
            raise
        self.begin_pending()

    def begin_pending(self) -> None:
        """Begin the commit of what was taken, if its updates are done; otherwise who does them begins it."""
        store = self.store
        if store.is_whole:
            with store.worker.kept_away():
                self.durable.end_updates(store.pipeline, store.worker.bell)

    def settle(self, *, quietly: bool = False) -> bool:
        """Wait for the commit under way, and warn if it failed; return False then.

        Collective where several ranks step together: it lasts on all of them, or on none. `quietly` leaves what failed
        on this rank to the caller.
        """
        latest = self.durable.latest
        state = self.wait()
        lasts = state is not CommitState.FAILED
        if latest.failure is not None and not (lasts or quietly):
            self._say_failed(latest.failure)
        failure = str(latest.failure)
        latest.settle()
        ranks = self.ranks()
        if ranks.several and not ranks.all(lasts):  # a number each step; names only if one has failed
            of_ranks = ranks.gather((f"{this_rank()}: {failure}", lasts)).values()
            failed = [said for said, lasted in of_ranks if not lasted]
            if state is CommitState.LASTING:
                elsewhere = StateError("another rank", "a commit that lasts", f"one that failed on {'; '.join(failed)}")
                latest.take_back(elsewhere)  # or a restart finds a step here that another rank lacks
                self._say_failed(elsewhere)
            return False
        if state is CommitState.LASTING and self._said is not None:
            self._said = None
            logger.warning("commits succeed again: %s", self._last)
        return lasts

    def wait(self) -> CommitState:
        """Wait until the latest commit lasts on this rank, or has failed here, which the next step says."""
        latest, store = self.durable.latest, self.store
        if latest.state is CommitState.PENDING and not store.is_closed:
            store.end_updates()
            with store.worker.kept_away():  # in the midst of a shift a step may be done, and the state not yet whole
                self.begin_pending()
                # If it is PENDING now, nobody would ever begin it.
                latest.give_up("updates that an error has stopped")
        return latest.wait()

    def commit(self, groups: Groups, engine: Mapping[str, Any] | None = None, step: int | None = None) -> None:
        """Commit what there is now, parameters that somebody changed included; it lasts when this returns.

        After an I/O error the commit before is whole. StateError: a step stopped halfway, or the commit failed on
        another rank. ValueError names what cannot be committed.
        """
        latest = self.durable.latest
        self.step = self.step if step is None else step
        self._check_between_steps()  # on all ranks: none waits below for one that is refused here
        with self.store.at_rest(), torch.no_grad():
            self.settle()  # first: what follows writes
            self.tick += 1
            self.ranks().together(partial(self._rewrite_and_take, groups, engine or {}))
            self.begin_pending()
        if not self.settle(quietly=True):  # it is raised here
            raise latest.failure or StateError("commit", "a commit that lasts", "one that failed on another rank")

    def _check_between_steps(self) -> None:
        def check() -> None:
            with self.store.at_rest():
                self.store.check(Need.STATE)

        self.ranks().together(check)

    def snapshot(self, name: str) -> int:
        """Keep the latest step under a name, on every rank or on none; return the step. No byte of state is moved."""
        self._check_between_steps()
        with self.store.at_rest():
            if not self.settle():
                found = f"one whose commit failed: {self.durable.latest.failure}"
                raise StateError("snapshot", "a step that lasts on every rank", found)
            self.snapshots().take(name)
        step = self.durable.latest.step
        assert step is not None
        return step

    def pin(self, groups: Groups, engine: Mapping[str, Any] | None = None, step: int | None = None) -> Manifest:
        """Have what there is now committed, and keep it until `unpin`, or until the process ends.

        Every rank must call it; it holds on all of them, or on none. It raises as `commit` does, and OutOfSpaceError
        if there is no room for what later steps write in its place.
        """
        store = self.store
        self._check_between_steps()
        with store.at_rest():
            changed = not self.settle() or not self.run.committed or bool(self.run.extents.uncommitted)
            changed = changed or any(self.durable.seal.is_changed(slot) for slot in store.slots)
            if not self.ranks().all(not changed):  # `commit` needs all ranks, also those without a change
                self.commit(groups, engine, step)
            held: list[Manifest] = []
            try:
                self.ranks().together(lambda: held.append(self.run.pin_newest()))
            except OSError:
                if held:  # another rank found no room
                    self.run.unpin_newest()
                raise
            return held[0]

    def watch(self, background: Background) -> None:
        """Say in `stats` how far this is, which reads the pinned step, until `end_background`."""
        self._background = background

    def end_background(self) -> BaseException | None:
        """Wait for what is watched and give up the pinned step; return what it failed with, if it did."""
        if (background := self._background) is None:
            return None
        background.join()
        self.unpin()
        return background.failure

    def unpin(self) -> None:
        """Give up what `pin` kept."""
        self._background = None
        with self.store.at_rest():
            self.durable.latest.wait()  # the committer's thread uses extents and manifests, too
            self.run.unpin_newest()

    def remove_snapshot(self, name: str) -> None:
        """Give up what `snapshot` kept, on every rank. KeyError: there is none of this name."""
        with self.store.at_rest():
            self.settle()
            self.snapshots().remove(name)

    def close(self) -> None:
        """Wait for what is under way and end the thread. Idempotent; no-op in a forked child."""
        if not self.store.is_own_process:
            return
        latest = self.durable.latest
        if not self.store.is_closed:
            self.store.end_begun()  # no step comes any more that would go on with it
        self.wait()
        if latest.failure is not None:
            warn_user(
                f"step {self.step} was the latest, and is not committed ({self._last}): {latest.failure}",
                of_this_rank=True,
            )
        latest.close()

    def identify(self, identity: Encoded | None = None) -> None:
        """Say what the run is from now on: `identity`, if that is known.

        Collective where several ranks step together, when parameters came.
        """
        if self._num_identified != self._num_placed:
            self._agree()
            self.run.identify(identity or self.identity(), self._agreed.uuid, self._agreed.hosts)
            self._num_identified = self._num_placed

    def _agree(self) -> None:
        if self._agreed.num_params == self._num_placed:  # not again by one rank alone, whose drive did not take it
            return
        ranks = self.ranks()
        known = ranks.gather(ranks.together(self._own_uuid))  # together: one that cannot read its run tells all
        self.tick = max(tick for _, _, tick, _, _ in known.values())
        self.begin_history(drawn for _, _, _, drawn, _ in known.values())
        hosts = {str(rank): host for rank, (*_, host) in known.items()}
        uuid = min(known.values())[1]  # that of a rank whose run is there, if one is: False is the least
        self._agreed = self._agreed._replace(num_params=self._num_placed, uuid=uuid, hosts=hosts)

    def _own_uuid(self) -> tuple[bool, str, int, str, str]:
        """Return if the run is new here, its name for this rank, its next tick, a number for its history, the host."""
        # A run that is loaded over counts on: of two commits the later one has the larger number on every rank.
        ticks = [Content.decode(manifest.blob, self.run.folder).tick + 1 for manifest in self.run.committed]
        known = self.run.uuid or random_id()
        return self.run.uuid is None, known, max([self.tick, *ticks]), random_id(), socket.gethostname()

    def begin_history(self, drawn: Iterable[str]) -> None:
        """Give the commits from here on identities that no other commits have, and all ranks alike.

        An identity is a digest of a random number, the least of what ranks have `drawn`, and the tick. The number is
        drawn anew wherever ticks may be counted again: it travels with what ranks tell each other there anyway, and
        steps need no further word.
        """
        self._agreed = self._agreed._replace(history=min(drawn))

    def identity(self) -> Encoded:
        """Return what the run is now: see `identity_of`."""
        return Encoded.of(identity_of(self.store, self.durable, self.engines_model or ModelRecord()))

    def note_adopted(self, content: Content) -> None:
        """The run goes on from here."""
        self.step = content.step
        self.tick = content.tick
        self.client_state = dict(content.client_state)

    @property
    def _last(self) -> str:
        step = self.durable.latest.step
        return "none lasts so far" if step is None else f"step {step} lasts"

    def _say_failed(self, failure: BaseException) -> None:
        """Once for each cause, until a commit lasts: a disk may be full for thousands of steps."""
        if (cause := _cause_of(failure)) != self._said:
            self._said = cause
            warn_user(
                f"a step could not be committed, and training goes on ({self._last}): {failure}. Each further step is "
                "tried; what fails for the same reason is not said again",
                of_this_rank=True,
            )

    def explain(self, error: BaseException) -> None:
        """Add to an error that a step ends with what commits that fail have to do with it."""
        failure = self.durable.latest.failure
        if isinstance(error, OutOfSpaceError) and failure is not None:
            error.add_note(
                f"Commits fail ({self._last}: {failure}), and what the latest one refers to is not written "
                "over: until one succeeds further steps need more space, with rewrite_every above 1."
            )

    def _prepare(self) -> None:
        """Make sure that the run knows what it is, and that there is something to commit of every subgroup."""
        store = self.store
        if self._num_identified != self._num_placed:
            self._agree()  # before anything that may fail on one rank alone
            with store.at_rest():
                self.identify()
                unborn = [slot for slot in store.slots if slot.residency is Residency.UNBORN]
                for position, slot in enumerate(unborn):
                    store.pipeline.acquire(unborn, position)
                    store.pipeline.will_change(slot)
                    store.pipeline.release(slot)
        if self.run.extents.suspects:  # a sync failed: the drive may have lost what was written before it
            with store.at_rest():
                for index in sorted(self.run.extents.suspects):
                    with HeldState(store.pipeline, store.slots[index]):
                        pass  # it is written again

    def _rewrite_and_take(self, groups: Groups, engine: Mapping[str, Any]) -> None:
        self._prepare()
        for slot in self.store.slots:
            if self.durable.seal.is_changed(slot):
                self._rewrite(slot)
        self._take(groups, engine)

    def _take(self, groups: Groups, engine: Mapping[str, Any]) -> None:
        behind = self.store.record  # the commit begins when its updates are done, and counts them
        counts = behind.inputs.counts if behind is not None else {}
        content = Content.taken(self.step, self.tick, self.store.table, counts, groups, self.client_state, engine)
        said = f"{self._agreed.history} {self.tick}".encode()
        commit_id = hashlib.blake2b(said, digest_size=_ID_BYTES).hexdigest()
        self.store.table.marks.note_commit(commit_id)
        self.durable.latest.take(Taken(self.step, content.encode(), commit_id))

    def _rewrite(self, slot: SlotRecord) -> None:
        """Have masters start from parameters that somebody changed, as the next update would, and write them."""
        store = self.store
        with HeldState(store.pipeline, slot) as memory:
            if slot.subgroup.form is MasterForm.ITSELF:  # the tail is the parameter: it is written as it is
                return
            for run in slot.subgroup.runs:
                master = read_master(run, slot, memory, store.table, store.kernels)
                write_master(run, master, slot, memory, store.table, store.kernels)


def _cause_of(failure: BaseException) -> tuple[object, ...]:
    return type(failure), getattr(failure, "errno", None), getattr(failure, "path", None)


def random_id() -> str:
    """Return 32 random hexadecimal digits. They come from the system: those of the training must not change by it."""
    return secrets.token_hex(_ID_BYTES)

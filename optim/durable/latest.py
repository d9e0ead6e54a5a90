"""Keep the state of the latest commit on this rank, which says what may be written meanwhile.

Invariants, which all the rest of durability rests on:

1. There is one commit at a time. While it is UNDER_WAY nothing is written: who wants to write waits for it.
2. What is written between two commits is one turn. A turn ends when its commit begins, or when it is known that there
   will be none; the first write after that begins the next turn.
3. No rank writes for a step before the commit of the step before is SETTLED: all ranks know whether it lasts on all.
   So where ranks end at any moment, they have a commit in common, whole on each.
4. A commit that FAILED leaves the one before whole, and the next one has what it had.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.durable.committer import Committer
from nvme_offload.offload.durable.manifest import NO_COMMIT
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.errors import StateError, check_may_follow
from nvme_offload.offload.host.buffer_pool import StagingBuffer
from nvme_offload.offload.storage.transfer import Transfer
from ..state.pipeline import StepPipeline
from ..telemetry.stats import Meter


class CommitState(enum.Enum):
    """The progress of the latest commit on this rank."""

    SETTLED = "settled"
    """All ranks know whether it lasts. Each may write."""
    PENDING = "pending"
    """All that belongs to a step was taken when that ended. Its updates, and their writes, go on behind it."""
    UNDER_WAY = "under way"
    """A thread waits for the writes, has the drive keep them and writes the manifest."""
    LASTING = "lasting"
    """It lasts on this rank. The others have not been asked."""
    FAILED = "failed"
    """It does not last on this rank."""


_MAY_FOLLOW = {
    CommitState.SETTLED: {CommitState.PENDING, CommitState.FAILED},
    CommitState.PENDING: {CommitState.UNDER_WAY, CommitState.FAILED},
    CommitState.UNDER_WAY: {CommitState.LASTING, CommitState.FAILED},
    CommitState.LASTING: {CommitState.SETTLED},
    CommitState.FAILED: {CommitState.SETTLED},
}
"""Which state may follow which, and who sees to it:

SETTLED -> PENDING [LatestCommit.take]
PENDING -> UNDER_WAY [LatestCommit.begin]
UNDER_WAY -> LASTING [LatestCommit.wait]: the manifest is on the drive
LASTING -> SETTLED [LatestCommit.settle]
SETTLED -> FAILED [LatestCommit.fail]: nothing could be taken
PENDING -> FAILED [LatestCommit.fail]: the updates stopped, or a write could not begin
UNDER_WAY -> FAILED [LatestCommit.fail]: a write, a flush or the manifest has failed
FAILED -> SETTLED [LatestCommit.settle]: the commit before counts, on all ranks
"""
_ENDS_TURN = (CommitState.UNDER_WAY, CommitState.FAILED)


class Taken(NamedTuple):
    """All that is committed of a step, beside what is written."""

    step: int
    blob: bytes
    commit_id: str


class LatestCommit:
    """The latest commit of one rank. All methods are for the thread that trains, or for the worker in its place."""

    def __init__(self, run: DurableRun, meter: Meter) -> None:
        self.state = CommitState.SETTLED
        self.failure: BaseException | None = None
        """The error of the latest commit; None where it lasts, or is under way for the first time."""
        self._run = run
        self._meter = meter
        self._committer = Committer()
        self._taken = Taken(0, b"", NO_COMMIT)
        self._turn_is_over = True

    @property
    def step(self) -> int | None:
        """The latest step that lasts on this rank; None before the first, and where a run is to be resumed."""
        return None if self._run.found else next((manifest.step for manifest in self._run.committed), None)

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about commits."""
        return {
            "commits": self._committer.num_committed,
            "failed_commits": self._committer.num_failed,
            "commit_failure": None if self.failure is None else str(self.failure),
            "commit_seconds": self._committer.commit_seconds,
            "commit_wait_seconds": self._committer.waited_seconds,
            "committed_step": self.step,
        }

    @property
    def may_write(self) -> bool:
        """Whether `begin_writing` would return at once."""
        return not self._committer.is_busy

    def become(self, state: CommitState) -> None:
        """Change the state; StateError: it does not follow the present one."""
        check_may_follow("the latest commit", _MAY_FOLLOW, self.state, state)
        # No call in between: a signal handler sees both or neither.
        self._turn_is_over = self._turn_is_over or state in _ENDS_TURN
        self.state = state

    def begin_writing(self) -> None:
        """Wait until extents may be chosen: call it before each. The first one after a commit begins another turn."""
        self._committer.wait()
        if self._turn_is_over:
            self._turn_is_over = False
            self._run.extents.begin_turn()

    def take(self, taken: Taken) -> None:
        """Keep what belongs to a step, for when its updates are done."""
        self._taken = taken
        self.become(CommitState.PENDING)

    def begin(self, pipeline: StepPipeline, bell: Bell) -> None:
        """Begin what is PENDING, behind the caller's back, and ring `bell` when it is over. Updates must be done."""
        if self.state is not CommitState.PENDING:
            return
        try:
            writes = pipeline.writes_under_way()
        except OSError as error:
            self.fail(error)
            return
        self.become(CommitState.UNDER_WAY)
        self._committer.begin(lambda: self._make_last(writes, bell))

    def fail(self, failure: BaseException) -> None:
        """Note that there will be no commit of this turn."""
        self.failure = failure
        self.become(CommitState.FAILED)

    def give_up(self, why: str) -> None:
        """Note that a step that is PENDING will not be committed; for anything else a no-op."""
        if self.state is CommitState.PENDING:
            self.fail(StateError("the commit", "a step whose updates are done", why))

    def wait(self) -> CommitState:
        """Wait for the thread; return the state then, which is not UNDER_WAY."""
        self._committer.wait()
        failure = self._committer.take_failure()
        if self.state is CommitState.UNDER_WAY:
            newest = next(iter(self._run.committed), None)
            if newest is not None and newest.commit_id == self._taken.commit_id:
                self.failure = None
                self.become(CommitState.LASTING)
            else:
                self.fail(failure or StateError("the commit", "to be made", "cut short by an exception before that"))
        return self.state

    def settle(self) -> None:
        """Note that all ranks know of it."""
        if self.state is not CommitState.SETTLED:
            self.become(CommitState.SETTLED)

    def take_back(self, failure: BaseException) -> None:
        """Destroy what lasts here and failed on another rank: the commit before counts."""
        self._run.take_back()
        self.failure = failure

    def close(self) -> None:
        """Wait for what is under way and end the thread. Idempotent."""
        self._committer.close()

    def _make_last(self, writes: Sequence[Transfer[StagingBuffer]], bell: Bell) -> None:
        step, blob, commit_id = self._taken
        try:
            for write in writes:
                write.wait()
            with self._meter.passing("commit"):
                self._run.commit(step, blob, self._run.extents.tables, commit_id)
        finally:
            bell.ring()  # who has something to write looks again
